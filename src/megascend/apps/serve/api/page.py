"""The status page at ``/``, its data at ``/status``, and gauges of ``/metrics``."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from megascend.apps.serve.service import Service
from megascend.apps.serve.tenancy import Model


def status(service: Service, tenant: str | None) -> dict[str, Any]:
    """Describe the current state of the service.

    Args:
        tenant: tenant whose sessions, models and errors are included; None: only totals, without any name, as at ``/metrics``.
    """
    content: dict[str, Any] = {"totals": totals(service)}
    if tenant is not None:
        content["tenant"] = tenant_status(service, tenant)
    return content


def totals(service: Service) -> dict[str, Any]:
    """Compute totals over all tenants. Times in seconds, rank 0's memory in bytes."""
    figures, tenancy = service.figures, service.tenancy
    return {
        "ready": service.ready,
        "uptime_s": service.clock() - service.started,
        "sessions": len(tenancy.sessions),
        "models": len(tenancy.models),
        "max_models": service.settings.max_models,
        "tokens": figures.tokens,
        "requests": _requests(service),
        "refused": dict(sorted(figures.refused.items())),
        "batches": {"max_tokens": service.settings.batch_tokens, "recent": list(figures.batches)},
        "memory": service.device_memory(),
    }


def tenant_status(service: Service, tenant: str) -> dict[str, Any]:
    """Describe a tenant's sessions, models with recent losses, and recent errors, newest first."""
    now, tenancy = service.clock(), service.tenancy
    sessions = [session for session in tenancy.sessions.values() if session.tenant == tenant]
    return {
        "name": tenant,
        "base_model": service.base.names[0],
        "pending_tokens": service.futures.tokens(tenant),
        "sessions": [
            {
                "name": session.name,
                "silent_s": now - session.last_heard,
                "models": len(session.models),
                "samplers": len(session.samplers),
            }
            for session in sessions
        ],
        "models": [_model_status(service, model) for model in tenancy.models.values() if model.tenant == tenant],
        "errors": [
            {
                "ago_s": now - problem.time,
                "kind": problem.kind,
                "model": problem.model,
                "category": problem.category,
                "message": problem.message,
            }
            for problem in reversed(service.figures.problems.get(tenant, ()))
        ],
    }  # fmt: skip


def loss_curve(losses: Iterable[tuple[int, float, int]]) -> list[tuple[int, float | None]]:
    """Return (step, loss per token), from (step, sum over tokens, tokens) of each forward_backward.

    The loss is None for a step without tokens or with a loss that is not finite, which JSON cannot represent.
    """
    sums: dict[int, tuple[float, int]] = {}
    for step, loss, tokens in losses:
        before = sums.get(step, (0.0, 0))
        sums[step] = (before[0] + loss, before[1] + tokens)
    means = ((step, loss / tokens if tokens else math.nan) for step, (loss, tokens) in sums.items())
    return [(step, mean if math.isfinite(mean) else None) for step, mean in means]


def _model_status(service: Service, model: Model) -> dict[str, Any]:
    lora = model.lora
    trained = {"attention": lora.train_attn, "mlp": lora.train_mlp, "output": lora.train_unembed}
    return {
        "name": model.name,
        "session": model.session,
        "rank": lora.rank,
        "layers": [name for name, is_trained in trained.items() if is_trained],
        "ready": model.ready,
        "steps": model.steps,
        "pending": service.futures.pending(model.name),
        "silent_s": service.clock() - model.used,
        "loss": loss_curve(model.losses),
    }


def _requests(service: Service) -> list[dict[str, Any]]:
    """Count requests by kind: pending ones, and finished ones by outcome."""
    pending, ended = service.futures.pending_by_kind(), service.figures.ended
    kinds = sorted({*pending, *(kind for kind, _ in ended)})
    return [
        {"kind": kind, "pending": pending.get(kind, 0)}
        | {outcome: ended.get((kind, outcome), 0) for outcome in ("ok", "user", "server")}
        for kind in kinds
    ]


_FILE = Path(__file__).with_name("page.html")


@cache
def page() -> tuple[bytes, str]:
    """Return the page and the Content-Security-Policy that allows only its own style and script, by digest."""
    # The page shows text that clients chose; with digests, a script that got into it would not run.
    text = _FILE.read_text("utf-8")
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {_digests(style)}; script-src {_digests(script)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digests(parts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


async def show_page(request: Request) -> Response:
    """Answer with the page; its figures come from ``/status``."""
    text, policy = page()
    headers = {
        "content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }  # fmt: skip
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


class ServiceGauges:
    """Prometheus collector of a service's current state."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield GaugeMetricFamily("megascend_sessions", "Open sessions.", len(service.tenancy.sessions))
        yield GaugeMetricFamily("megascend_models", "Models in training.", len(service.tenancy.models))
        memory = service.device_memory()
        if memory is not None:
            allocated, peak = memory["allocated"], memory["peak"]
            yield GaugeMetricFamily("megascend_device_memory_bytes", "Rank 0's memory on its device.", allocated)
            yield GaugeMetricFamily(
                "megascend_device_memory_peak_bytes", "Peak of rank 0's memory on its device.", peak
            )
        pending = GaugeMetricFamily("megascend_pending", "Requests that have not ended.", labels=["kind"])
        for kind, count in sorted(service.futures.pending_by_kind().items()):
            pending.add_metric([kind], count)
        yield pending
