"""Routes about requests to sample that are under way: clients that share a sampler, what has ended, what nobody waits for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from megascend.serve.answering import Json
from megascend.serve.bodies import CancelFuture, RetrieveFutures, SamplerTarget
from megascend.serve.catalogue import Listing
from megascend.serve.reading import read_json
from megascend.serve.service import Service

LONG_POLL_S = 30.0


def sampler_routes() -> list[tuple[str, str, Listing]]:
    """(method, path under /api/v1, handler) of all of them."""
    return [
        ("POST", "client/dynamic_config", dynamic_config),
        ("POST", "join_sampling_session", join),
        ("POST", "retrieve_futures", retrieve_futures),
        ("POST", "cancel_future", cancel_future),
    ]


async def dynamic_config(service: Service, request: Request, tenant: str) -> Response:
    return Json({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


async def join(service: Service, request: Request, tenant: str) -> Response:
    sampler = SamplerTarget.read(await read_json(request)).sampling_session_id
    session, _ = service.tenancy.sampler(sampler, tenant)
    session.clones[sampler] = session.clones.get(sampler, 0) + 1
    return Json({"type": "join_sampling_session", "client_counter": session.clones[sampler]})


async def retrieve_futures(service: Service, request: Request, tenant: str) -> Response:
    """Which requests of one client of a sampler have ended since it asked last."""
    asked = RetrieveFutures.read(await read_json(request))
    sampler, timeout, known = asked.target.sampling_session_id, asked.timeout, asked.retrieved_request_ids
    service.tenancy.sampler(sampler, tenant)
    timeout_s = LONG_POLL_S if not isinstance(timeout, int | float) else min(max(float(timeout), 0.0), LONG_POLL_S)
    for name in known if isinstance(known, list) else []:
        if isinstance(name, str) and name.startswith(f"{sampler}:request:"):
            service.futures.release(name, tenant)
    ended, last = await service.futures.completions.since(
        sampler, asked.target.cloned_sampler_id, asked.prev_cursor, timeout_s
    )
    found = [{"state": "finished" if each else "failed", "request_id": name} for name, each in ended.items()]
    return Json({"completions": found, "cursor": last})


async def cancel_future(service: Service, request: Request, tenant: str) -> Response:
    """End a request to sample that nobody waits for. One that has ended, or is not known, is as it is."""
    future = service.futures.get(CancelFuture.read(await read_json(request)).request_id, tenant)
    if future is not None and future.kind == "sample" and future.ended is None:
        service.cancel(future)
    return Response(status_code=204)
