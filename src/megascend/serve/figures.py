"""Figures of the service, for Prometheus and for the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from megascend.serve.scheduler.futures import Future

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
UNITS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
RECENT_BATCHES = 120
RECENT_PROBLEMS = 20


@dataclass(frozen=True)
class Problem:
    """A failure that a tenant was told of.

    Attributes:
        time: of the service's clock, in seconds.
        kind: of the request.
        model: "" if it was for none.
        category: "user" or "server".
    """

    time: float
    kind: str
    model: str
    category: str
    message: str


class Figures:
    """Count what has happened since the start. No tenant's name is among the metrics.

    Attributes:
        registry: of all metrics.
        batches: (models, tokens) of the last batches, oldest first.
        problems: the last failures of each tenant, oldest first.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # twice as many series, all of which would have the time of the start
        self.registry = CollectorRegistry()

        def histogram(name: str, what: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"megascend_{name}", what, labels, buckets=tuple(buckets), registry=self.registry)

        self._ended = Counter(
            "megascend_requests", "Requests that have ended.", ("kind", "outcome"), registry=self.registry
        )
        self._refused = Counter(
            "megascend_refused", "Requests refused, by HTTP status.", ("status",), registry=self.registry
        )
        self._tokens = Counter("megascend_tokens", "Tokens trained on.", registry=self.registry)
        self._latency = histogram("request_seconds", "From a request to its outcome.", BUCKETS_S, "kind")
        self._together = histogram(
            "models_in_batch", "Models that shared the batch of a forward_backward.", BATCH_SIZES
        )
        self._waited = histogram(
            "units_waited", "Units of work before that of a forward_backward, from when it could run.", UNITS
        )
        self._waited_s = histogram(
            "wait_seconds", "From when a forward_backward could run to the unit that it ran in.", BUCKETS_S
        )
        self.batches: deque[tuple[int, int]] = deque(maxlen=RECENT_BATCHES)
        self.problems: dict[str, deque[Problem]] = {}

    def count(self, future: Future, together: int, now: float) -> None:
        """Count a future that has ended."""
        outcome = "ok" if future.failure is None else future.failure.category
        self._ended.labels(future.kind, outcome).inc()
        self._latency.labels(future.kind).observe(now - future.made)
        if future.failure is not None:
            self.note(future.tenant, Problem(now, future.kind, future.model or "", outcome, future.failure.message))
        elif future.kind == "forward_backward":
            self._tokens.inc(future.tokens)
            self._together.observe(together)

    def count_wait(self, future: Future, units: int | None, seconds: float) -> None:
        """Count how long a future that has ended had waited for its turn."""
        if units is not None and future.kind == "forward_backward":
            self._waited.observe(units)
            self._waited_s.observe(seconds)

    def count_batch(self, futures: Iterable[Future]) -> None:
        """Note how full a batch was.

        Args:
            futures: all that ended with it; those of gradients that succeeded were in it.
        """
        inside = [each for each in futures if each.kind == "forward_backward" and each.failure is None]
        if inside:
            self.batches.append((len({each.model for each in inside}), sum(each.tokens for each in inside)))

    def note(self, tenant: str, problem: Problem) -> None:
        """Keep a failure for its tenant to see; the oldest makes room."""
        self.problems.setdefault(tenant, deque(maxlen=RECENT_PROBLEMS)).append(problem)

    def refuse(self, status: int) -> None:
        """Count a request that was not taken."""
        self._refused.labels(str(status)).inc()

    @property
    def tokens(self) -> int:
        """Tokens read in gradients that succeeded."""
        return int(_values(self._tokens)[()])

    @property
    def refused(self) -> dict[str, int]:
        """Requests that were not answered with 200, by HTTP status."""
        return {status: int(count) for (status,), count in _values(self._refused).items()}

    @property
    def ended(self) -> dict[tuple[str, ...], int]:
        """Ended requests by (kind, "ok", "user" or "server")."""
        return {key: int(count) for key, count in _values(self._ended).items()}

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """Return a counter's values by those of its labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return {tuple(each.labels.values()): each.value for each in samples if each.name.endswith("_total")}
