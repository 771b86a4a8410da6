"""The ASGI application: routes of the Tinker API, health and metrics, above :class:`megascend.apps.serve.service.Service`."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megascend.apps.serve.activity import Activity
from megascend.apps.serve.api.bodies import CancelFuture, CreateSampler, RetrieveFutures, SamplerTarget, WithMetadata
from megascend.apps.serve.api.catalogue import catalogue_routes
from megascend.apps.serve.api.guard import Audit, Handler, Json, RequestGuard
from megascend.apps.serve.api.keys import Keys
from megascend.apps.serve.api.page import ServiceGauges, show_page, status
from megascend.apps.serve.api.reading import LARGE, read_body, read_json
from megascend.apps.serve.api.wire import (
    PROTOBUF,
    TrainAnswer,
    dumps,
    train_request_of_json,
    train_request_of_protobuf,
)
from megascend.apps.serve.checkpoints import CheckpointPath, sampler_name
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.operations import BY_PATH, CheckedRequest, checked, number_in, settled, train
from megascend.apps.serve.samplers.adapters import Samplers
from megascend.apps.serve.samplers.messages import SampleAnswer
from megascend.apps.serve.scheduler.futures import Future
from megascend.apps.serve.service import Service
from megascend.apps.serve.tenancy import Model

LONG_POLL_S = 30.0
"""Longest wait of a poll; clients time out after 45 s."""
TICK_S = 2.0
LATE_S = 10.0
"""Delay of a tick from which on this process counts as stopped meanwhile: clients' heartbeats, every 10 s, were not read."""
SWEEP_S = 600.0
"""Interval of the search for expired checkpoints."""
SLOW_S = 5.0
"""Time after which a storage that does not answer counts as one that cannot be written."""
TRIM_S = 30.0
"""Interval of returning freed memory to the system."""
log = logging.getLogger("megascend.apps.serve")

ABSENT = {
    ("POST", "auth/token"): "exchanging keys for tokens; every request carries the API key",
    ("GET", "auth/apikey/me"): "looking up an API key; keys are in the server's settings",
    ("DELETE", "auth/apikey/me"): "revoking an API key; keys are in the server's settings",
    ("GET", "audit"): "reading the audit log; it is a file beside the checkpoints, for who runs the server",
    ("GET", "billing/usage/events"): "billing",
    ("GET", "billing/usage/checkpoints/current"): "billing; listings of checkpoints have their sizes",
    ("POST", "billing/usage/checkpoints/current"): "billing; listings of checkpoints have their sizes",
    ("POST", "create_custom_loss"): "uploading a loss; forward_backward_custom computes it in the client",
    ("POST", "copy_weights"): "copying checkpoints; load one that is published, and save it",
    ("POST", "save_weights_external"): "saving in other formats; checkpoints are in that of peft (archive)",
    ("GET", "training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls"): "signed addresses; use archive",
    ("PUT", "sessions/{session}/project"): "projects",
    ("GET", "sessions/{session}/trace_export"): "exporting traces; /metrics has the server's figures",
    ("POST", "sessions/search"): "searching sessions; list them",
}
"""Missing features by method and path under /api/v1, with the alternative."""


class Api:
    """The request handlers.

    Args:
        service: the service that handlers act on.
        keys: accepted API keys.
    """

    def __init__(self, service: Service, keys: Keys) -> None:
        self.service = service
        submit = service.submit if service.vllm is None else service.vllm.submit
        self._samplers = Samplers(service, service.settings.max_samplers, submit)
        storage = service.settings.storage
        self.audit = Audit(storage / "audit.jsonl" if service.settings.log == "requests" else None)
        self._guard = RequestGuard(service, keys, self.audit)
        self._probe: asyncio.Future[str | None] | None = None

    def routes(self) -> list[Route]:
        """List the routes of the API, health, metrics and status page."""
        posts: dict[str, Handler] = {
            "client/config": self.client_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "forward": partial(self.forward_backward, forward_only=True),
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
            "client/dynamic_config": self.dynamic_config,
            "join_sampling_session": self.join_sampling_session,
            "retrieve_futures": self.retrieve_futures,
            "cancel_future": self.cancel_future,
            "telemetry": self.telemetry,
        }
        posts |= {path: partial(self.submit_operation, path) for path in BY_PATH}
        gets: dict[str, Handler] = {"get_server_capabilities": self.capabilities, "samplers/{sampler}": self.sampler}
        entries = [("POST", *item) for item in posts.items()] + [("GET", *item) for item in gets.items()]
        entries += [(method, path, partial(handle, self.service)) for method, path, handle in catalogue_routes()]
        entries += [(method, path, partial(self.refuse, path)) for method, path in ABSENT]
        before = self._guard.before
        routes = [Route(f"/api/v1/{path}", before(handler), methods=[method]) for method, path, handler in entries]
        routes += [Route(path, self.health) for path in ("/api/v1/healthz", "/healthz", "/readyz")]
        return [*routes, Route("/metrics", self.metrics), Route("/", show_page), Route("/status", self.status)]

    # --- sessions and models ---

    async def client_config(self, request: Request, tenant: str) -> Response:
        limits = self.service.settings.limits
        chunk = min(5_000_000, limits.body_bytes // 4)
        return Json({
            "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": True,
            "fwdbwd_max_chunk_len": min(1024, limits.samples), "fwdbwd_max_chunk_bytes_count": chunk,
        })  # fmt: skip

    async def create_session(self, request: Request, tenant: str) -> Response:
        body = WithMetadata.read(await read_json(request))
        session = self.service.open_session(tenant, body.user_metadata)
        answer: dict[str, Any] = {"type": "create_session", "session_id": session.name}
        if not self.service.base.adapts_output:
            answer["warning_message"] = (
                "the output layer of this server's model is not adapted: train_unembed has no effect"
            )
        return Json(answer)

    async def heartbeat(self, request: Request, tenant: str) -> Response:
        self.service.tenancy.session((await read_json(request)).get("session_id"), tenant)
        return Json({"type": "session_heartbeat"})

    async def get_info(self, request: Request, tenant: str) -> Response:
        model = self.service.tenancy.model((await read_json(request)).get("model_id"), tenant)
        base = self.service.base
        data = {"arch": base.architecture, "model_name": base.names[0], "tokenizer_id": base.names[0]}
        return Json({
            "type": "get_info", "model_id": model.name, "model_name": base.names[0], "model_data": data,
            "is_lora": True, "lora_rank": model.lora.rank,
        })  # fmt: skip

    async def capabilities(self, request: Request, tenant: str) -> Response:
        base = self.service.base
        models = [
            {"model_name": name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
            for name in base.names
        ]
        return Json({"supported_models": models})

    # --- training ---

    async def forward_backward(self, request: Request, tenant: str, *, forward_only: bool = False) -> Response:
        # The model first, in the thread too: a lookup. Refused later, a request would cost its samples and images.
        require_model = partial(self.service.tenancy.model, tenant=tenant)
        options = (self.service.settings.limits.samples, self.service.base.image_processor, require_model)
        if PROTOBUF in request.headers.get("content-type", ""):
            path, body = "protobuf", await read_body(request)
            read = partial(train_request_of_protobuf, body, *options)
        else:
            path, content = "forward" if forward_only else "forward_backward", await read_json(request, LARGE)
            body = request.state.body
            read = partial(train_request_of_json, content, *options, forward_only=forward_only)

        def read_and_check() -> CheckedRequest:
            return checked(self.service, tenant, replace(read(), digest=request.state.digest))

        train_request = await self.service.in_thread(tenant, read_and_check)
        # No await from here to note_request: requests must reach the database in the order in which they were enqueued.
        future = train(self.service, tenant, train_request)
        self.service.durability.note_request(future, path, body, train_request.number)
        return _pending_answer(future)

    async def submit_operation(self, path: str, request: Request, tenant: str) -> Response:
        """Handle the paths of :data:`~megascend.apps.serve.operations.BY_PATH`, which are answered with a future."""
        body = settled(path, await read_json(request))
        future = BY_PATH[path](self.service, tenant, body)
        if path != "unload_model":  # has no number: whoever removes the model gets this answer
            self.service.require_same_body(future, request.state.digest)
        self.service.durability.note_request(future, path, body, number_in(path, body))
        return _pending_answer(future)

    # --- sampling ---

    async def create_sampling_session(self, request: Request, tenant: str) -> Response:
        body = await read_json(request)
        session = self.service.tenancy.session(body.get("session_id"), tenant)
        options = CreateSampler.read(body)
        name = sampler_name(session.name, options.sampling_session_seq_id)
        if options.model_path is not None:  # a missing checkpoint is refused here, not with the first request to sample
            path = CheckpointPath.parse(options.model_path)
            await self.service.in_thread(tenant, partial(self.service.checkpoints.find, tenant, path, public=True))
        self.service.add_sampler(session, name, options.model_path)
        return Json({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request, tenant: str) -> Response:
        name = request.path_params["sampler"]
        _, path = self.service.tenancy.sampler(name, tenant)
        return Json({"sampler_id": name, "base_model": self.service.base.names[0], "model_path": path})

    async def asample(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, LARGE)
        prepared = await self.service.in_thread(tenant, self._samplers.prepare, tenant, body)
        future = self._samplers.sample(tenant, body, prepared)
        self.service.require_same_body(future, request.state.digest)
        names = [f"{future.name}:{part}" for part in range(future.parts)]
        return Json({"request_id": future.name, "sample_sequence_ids": names})

    # --- answers ---

    async def retrieve_future(self, request: Request, tenant: str) -> Response:
        body = await read_json(request)
        future = await self.service.wait(tenant, body.get("request_id"), LONG_POLL_S)
        if future.ended is None:
            pending = {"type": "try_again", "request_id": future.name, "queue_state": "active"}
            return Json(pending, 408)  # on which clients poll again
        if future.failure is not None:  # status 200, as the retrieval succeeded: clients raise by the category
            return Json({"error": future.failure.message, "category": future.failure.category})
        if not isinstance(future.answer, TrainAnswer | SampleAnswer):
            return Json(future.answer)
        # In threads: an answer of megabytes takes long enough to encode to delay other tenants.
        answer = future.answer
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await self.service.in_thread(tenant, answer.protobuf), media_type=PROTOBUF)
        text = await self.service.in_thread(tenant, lambda: dumps(answer.json()))
        return Response(text.encode("ascii"), media_type=Json.media_type)

    # --- clients that share a sampler ---

    async def dynamic_config(self, request: Request, tenant: str) -> Response:
        return Json({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def join_sampling_session(self, request: Request, tenant: str) -> Response:
        sampler = SamplerTarget.read(await read_json(request)).sampling_session_id
        session, _ = self.service.tenancy.sampler(sampler, tenant)
        counter = self.service.add_clone(session, sampler)
        return Json({"type": "join_sampling_session", "client_counter": counter})

    async def retrieve_futures(self, request: Request, tenant: str) -> Response:
        """Answer with the requests of one client of a sampler that have ended since its last poll."""
        query, futures = RetrieveFutures.read(await read_json(request)), self.service.futures
        sampler, timeout, retrieved = query.target.sampling_session_id, query.timeout, query.retrieved_request_ids
        self.service.tenancy.sampler(sampler, tenant)
        timeout_s = LONG_POLL_S if timeout is None else min(max(float(timeout), 0.0), LONG_POLL_S)
        # Names outside this sampler are ignored: the call acknowledges its own answers only.
        for name in retrieved if isinstance(retrieved, list) else []:
            if isinstance(name, str) and name.startswith(f"{sampler}:request:"):
                future = futures.get(name, tenant)
                if future is not None:
                    futures.mark_fetched(future)
        clone = query.target.cloned_sampler_id
        ended, cursor = await futures.completions.since(sampler, clone, query.prev_cursor, timeout_s)
        completions = [
            {"state": "finished" if succeeded else "failed", "request_id": name} for name, succeeded in ended.items()
        ]
        return Json({"completions": completions, "cursor": cursor})

    async def cancel_future(self, request: Request, tenant: str) -> Response:
        """Cancel a sampling request; a finished or unknown one is ignored."""
        # Only sampling: a training request that was accepted has its number, and the model's later requests rely on it.
        future = self.service.futures.get(CancelFuture.read(await read_json(request)).request_id, tenant)
        if future is not None and future.kind == "sample" and future.ended is None:
            self.service.cancel(future)
        return Response(status_code=204)

    # --- the rest ---

    async def telemetry(self, request: Request, tenant: str) -> Response:
        return Json({"status": "accepted"})  # discarded

    async def refuse(self, path: str, request: Request, tenant: str) -> Response:
        feature = ABSENT[request.method, path]
        raise RequestRefusedError(f"{path} is not supported by this server: {feature}")

    async def health(self, request: Request) -> Response:
        """Answer health (always) and readiness (once the ranks have the model, while state can be written)."""
        durability = self.service.durability
        if request.scope["path"] == "/readyz":
            # Not ready while requests are replayed: new ones would wait behind them for as long as that takes.
            if not (self.service.ready and durability.recovered):
                return Json({"status": "starting"}, 503)
            if durability.stalled or await self._storage_problem() is not None:
                return Json({"status": "state cannot be written"}, 503)
        return Json({"status": "ok"})

    async def _storage_problem(self) -> str | None:
        """Return why the storage cannot be written, or None; one attempt at a time, as anyone may ask."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(asyncio.to_thread(self.service.checkpoints.problem))
        try:
            return await asyncio.wait_for(asyncio.shield(self._probe), SLOW_S)
        except (TimeoutError, asyncio.TimeoutError):
            return "the disk does not answer"

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.figures.text(), media_type="text/plain; version=0.0.4")

    async def status(self, request: Request) -> Response:
        """Answer with the figures of the status page; only totals for a request without a key."""
        try:
            tenant = self._guard.tenant(request) if "x-api-key" in request.headers else None
        except RequestRefusedError as error:
            return self._guard.refusal(error)
        return Json(status(self.service, tenant), headers={"cache-control": "no-store"})


def _pending_answer(future: Future) -> Response:
    return Json({"request_id": future.name, "model_id": future.model})


def make_application(service: Service, keys: Keys) -> Starlette:
    """Build the ASGI application of a service."""
    service.figures.registry.register(ServiceGauges(service))
    api, activity = Api(service, keys), Activity(service)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async def run_periodically() -> None:
            returned = service.clock()
            loop = asyncio.get_running_loop()
            while True:
                start = loop.time()
                await asyncio.sleep(TICK_S)
                # Without this task no session would end, and no request that waits for a missing one would run.
                try:
                    if loop.time() - start - TICK_S > LATE_S:
                        log.warning(
                            "this process was stopped or blocked for %.0f s; timeouts start again", loop.time() - start
                        )
                        restart_timeouts(service)
                    activity.report()
                    await sweep(service)  # on the event loop, like all that touches the service's state
                    if service.clock() - returned > TRIM_S:
                        returned = service.clock()
                        await asyncio.to_thread(return_freed)
                except Exception:  # storage that cannot be read, for one
                    log.exception("timeouts could not be applied; trying again in %g s", TICK_S)

        task = asyncio.create_task(run_periodically())
        try:
            yield
        finally:
            task.cancel()
            # Raised by the cancellation above, which is not an error.
            with suppress(asyncio.CancelledError):
                await task
            activity.report(last=True)
            # In a thread, as it waits for the disk.
            await asyncio.to_thread(service.close)
            api.audit.close()

    async def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return Json({"detail": "not found" if status == 404 else "not allowed", "category": "user"}, status)

    return Starlette(routes=api.routes(), lifespan=lifespan, exception_handlers={404: not_found, 405: not_found})


async def sweep(service: Service) -> None:
    """Apply timeouts: silent sessions, requests missing from a model's order, unfetched answers, expired checkpoints."""
    if service.durability.stalled:
        restart_timeouts(service)
        return
    for session in service.tenancy.silent(service.settings.session_timeout_s):
        service.end_session(session)
    for model in list(service.tenancy.models.values()):
        if model.gap_since is not None and service.clock() - model.gap_since > service.settings.gap_timeout_s:
            _skip_missing(service, model)
    service.futures.forget()
    service.sequences.expire()
    if service.clock() - service.swept > SWEEP_S:
        service.swept = service.clock()
        await asyncio.to_thread(service.checkpoints.remove_expired)


def restart_timeouts(service: Service) -> None:
    """Restart all timeouts, after a time in which nothing was answered: silence was not the clients' fault."""
    service.tenancy.restart_session_timeouts()
    service.futures.restart_retention()
    for model in service.tenancy.models.values():
        model.gap_since = None if model.gap_since is None else service.clock()


def _skip_missing(service: Service, model: Model) -> None:
    """Fail the requests missing from a model's order, so that those behind them can run; their optimizer step fails."""
    for number in model.order.missing():
        problem = f"request {number} of this model did not arrive within {service.settings.gap_timeout_s} s"
        service.enqueue_missing(model, number, problem)
    model.gap_since = service.clock() if model.order.early else None


@cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``, or None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed() -> None:
    """Return freed pages to the system, in all arenas. Takes milliseconds, without blocking other threads.

    glibc keeps freed memory below any block still in use. A server that allocates tensors of many sizes and retains small answers
    for minutes would otherwise grow to a multiple of what it needs.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
