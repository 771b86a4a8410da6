"""The ASGI application: routes of the Tinker API, health and figures, above :class:`megascend.serve.service.Service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megascend.serve import heap
from megascend.serve.answering import Json
from megascend.serve.asking import BY_PATH, number_in, settled
from megascend.serve.audit import Audit
from megascend.serve.bodies import CreateSampler, WithMetadata
from megascend.serve.catalogue import catalogue_routes
from megascend.serve.elsewhere import absent_routes
from megascend.serve.errors import RequestRefusedError
from megascend.serve.guard import Guard, Handler
from megascend.serve.keys import Keys
from megascend.serve.names import CheckpointPath, sampler_name
from megascend.serve.page import show_page
from megascend.serve.reading import LARGE, read_body, read_json
from megascend.serve.sampler_routes import sampler_routes
from megascend.serve.samplers import Samplers
from megascend.serve.sampling_wire import SampleAnswer
from megascend.serve.scheduler.futures import Future
from megascend.serve.service import Service
from megascend.serve.status import status
from megascend.serve.sweeping import sweep
from megascend.serve.training import train
from megascend.serve.wire import PROTOBUF, TrainAnswer, train_request_of_json, train_request_of_protobuf

LONG_POLL_S = 30.0
"""How long an answer is waited for; clients give up a call after 45 s."""
TICK_S = 2.0


class Api:
    """Answers requests.

    Args:
        service: what they are about.
        keys: who may ask.
    """

    def __init__(self, service: Service, keys: Keys) -> None:
        self.service = service
        put = service.put if service.vllm is None else service.vllm.put
        self._samplers = Samplers(service, service.settings.max_samplers, put)
        storage = service.settings.storage
        self.audit = Audit(storage / "audit.jsonl" if service.settings.log == "requests" else None)
        self._guard = Guard(service, keys, self.audit)

    def routes(self) -> list[Route]:
        """All of the API, by path."""
        posts: dict[str, Handler] = {
            "client/config": self.client_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "forward": self.forward,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
            "telemetry": self.telemetry,
        }
        posts |= {path: partial(self.ask, path) for path in BY_PATH}
        gets: dict[str, Handler] = {"get_server_capabilities": self.capabilities, "samplers/{sampler}": self.sampler}
        found = [("POST", *each) for each in posts.items()] + [("GET", *each) for each in gets.items()]
        found += [
            (method, path, partial(handle, self.service))
            for method, path, handle in [*sampler_routes(), *catalogue_routes()]
        ]
        found += absent_routes()
        before = self._guard.before
        routes = [Route(f"/api/v1/{path}", before(handler), methods=[method]) for method, path, handler in found]
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
            "is_lora": True, "lora_rank": model.rank,
        })  # fmt: skip

    async def capabilities(self, request: Request, tenant: str) -> Response:
        base = self.service.base
        found = [
            {"model_name": name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
            for name in base.names
        ]
        return Json({"supported_models": found})

    # --- training ---

    async def forward_backward(self, request: Request, tenant: str, *, forward_only: bool = False) -> Response:
        most = self.service.settings.limits.samples
        if PROTOBUF in request.headers.get("content-type", ""):
            path, body = "protobuf", await read_body(request)
            wanted = await asyncio.to_thread(train_request_of_protobuf, body, most)
        else:
            path, body = "forward" if forward_only else "forward_backward", await read_json(request, LARGE)
            wanted = await asyncio.to_thread(train_request_of_json, body, most, forward_only=forward_only)
        future = train(self.service, tenant, wanted)
        self.service.durability.asked(future, path, body, wanted.number)
        return _promised(future)

    async def ask(self, path: str, request: Request, tenant: str) -> Response:
        """Whatever else is answered with a future."""
        body = settled(path, await read_json(request))
        future = BY_PATH[path](self.service, tenant, body)
        self.service.durability.asked(future, path, body, number_in(path, body))
        return _promised(future)

    async def forward(self, request: Request, tenant: str) -> Response:
        return await self.forward_backward(request, tenant, forward_only=True)

    # --- sampling ---

    async def create_sampling_session(self, request: Request, tenant: str) -> Response:
        body = await read_json(request)
        session = self.service.tenancy.session(body.get("session_id"), tenant)
        asked = CreateSampler.read(body)
        name = sampler_name(session.name, asked.sampling_session_seq_id)
        if asked.model_path is not None:
            self.service.checkpoints.find(tenant, CheckpointPath.parse(asked.model_path), public=True)
        self.service.add_sampler(session, name, asked.model_path)
        return Json({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request, tenant: str) -> Response:
        name = request.path_params["sampler"]
        _, path = self.service.tenancy.sampler(name, tenant)
        return Json({"sampler_id": name, "base_model": self.service.base.names[0], "model_path": path})

    async def asample(self, request: Request, tenant: str) -> Response:
        future = self._samplers.sample(tenant, await read_json(request, LARGE))
        names = [f"{future.name}:{part}" for part in range(future.parts)]
        return Json({"request_id": future.name, "sample_sequence_ids": names})

    # --- answers ---

    async def retrieve_future(self, request: Request, tenant: str) -> Response:
        body = await read_json(request)
        future = await self.service.wait(tenant, body.get("request_id"), LONG_POLL_S)
        if future.ended is None:
            pending = {"type": "try_again", "request_id": future.name, "queue_state": "active"}
            return Json(pending, 408)
        if future.failure is not None:
            return Json({"error": future.failure.message, "category": future.failure.category})
        if not isinstance(future.answer, TrainAnswer | SampleAnswer):
            return Json(future.answer)
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(future.answer.protobuf), media_type=PROTOBUF)
        return Json(await asyncio.to_thread(future.answer.json))

    async def telemetry(self, request: Request, tenant: str) -> Response:
        return Json({"status": "accepted"})  # nothing of it is kept

    async def health(self, request: Request) -> Response:
        """Healthy as soon as it answers; ready once the ranks have the model."""
        if request.scope["path"] == "/readyz" and not (self.service.ready and self.service.durability.recovered):
            return Json({"status": "starting"}, 503)
        return Json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.figures.text(), media_type="text/plain; version=0.0.4")

    async def status(self, request: Request) -> Response:
        """What the page shows; totals alone for a request without a key."""
        try:
            tenant = self._guard.tenant(request) if "x-api-key" in request.headers else None
        except RequestRefusedError as error:
            return self._guard.refusal(error)
        return Json(status(self.service, tenant), headers={"cache-control": "no-store"})


def _promised(future: Future) -> Response:
    return Json({"request_id": future.name, "model_id": future.model})


def make_application(service: Service, keys: Keys) -> Starlette:
    """The application of a service.

    Args:
        keys: who may use it.
    """
    api = Api(service, keys)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async def ticking() -> None:
            returned = service.clock()
            while True:
                await asyncio.sleep(TICK_S)
                sweep(service)
                if service.clock() - returned > heap.EVERY_S:
                    returned = service.clock()
                    await asyncio.to_thread(heap.return_freed)

        task = asyncio.create_task(ticking())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(service.durability.close)
            api.audit.close()

    async def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return Json({"detail": "not found" if status == 404 else "not allowed", "category": "user"}, status)

    return Starlette(routes=api.routes(), lifespan=lifespan, exception_handlers={404: not_found, 405: not_found})
