"""The ASGI application: routes of the Tinker API, health and figures, above :class:`megascend.serve.service.Service`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from megascend.errors import MegascendError
from megascend.serve import saving
from megascend.serve.audit import Audit
from megascend.serve.catalogue import Listing, catalogue_routes
from megascend.serve.errors import RequestRefusedError
from megascend.serve.figures import Problem
from megascend.serve.futures import Future
from megascend.serve.keys import Keys
from megascend.serve.names import sampler_name
from megascend.serve.page import show_page
from megascend.serve.reading import read_body, read_json
from megascend.serve.requests import integer, lora_of, metadata_of, text
from megascend.serve.samplers import Samplers
from megascend.serve.sampling_wire import SampleAnswer
from megascend.serve.service import Service
from megascend.serve.status import status
from megascend.serve.wire import PROTOBUF, TrainAnswer, number_of, train_request_of_json, train_request_of_protobuf

LONG_POLL_S = 30.0
"""How long an answer is waited for; clients give up a call after 45 s."""
TICK_S = 2.0

Handler = Callable[["Api", Request, str], Awaitable[Response]]


class Api:
    """Answers requests.

    Args:
        service: what they are about.
        keys: who may ask.
    """

    def __init__(self, service: Service, keys: Keys) -> None:
        self.service, self._keys = service, keys
        self._samplers = Samplers(service, service.settings.max_samplers)
        storage = service.settings.storage
        self.audit = Audit(storage / "audit.jsonl" if service.settings.log == "requests" else None)
        self._most = service.settings.limits.body_bytes

    def routes(self) -> list[Route]:
        """All of the API, by path."""
        posts: dict[str, Handler] = {
            "client/config": Api.client_config,
            "create_session": Api.create_session,
            "session_heartbeat": Api.heartbeat,
            "create_model": Api.create_model,
            "unload_model": Api.unload_model,
            "get_info": Api.get_info,
            "forward_backward": Api.forward_backward,
            "forward": Api.forward,
            "optim_step": Api.optim_step,
            "save_weights": Api.save_weights,
            "save_weights_for_sampler": Api.save_weights_for_sampler,
            "load_weights": Api.load_weights,
            "create_sampling_session": Api.create_sampling_session,
            "asample": Api.asample,
            "retrieve_future": Api.retrieve_future,
            "telemetry": Api.telemetry,
        }
        routes = [Route(f"/api/v1/{path}", self.guarded(handler), methods=["POST"]) for path, handler in posts.items()]
        gets: dict[str, Handler] = {"get_server_capabilities": Api.capabilities, "samplers/{sampler}": Api.sampler}
        routes += [Route(f"/api/v1/{path}", self.guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        for method, path, handle in catalogue_routes():
            routes.append(Route(f"/api/v1/{path}", self.guarded(partial(_of_service, handle)), methods=[method]))
        routes += [Route(path, self.health) for path in ("/api/v1/healthz", "/healthz", "/readyz")]
        return [*routes, Route("/metrics", self.metrics), Route("/", show_page), Route("/status", self.status)]

    def guarded(self, handler: Any) -> Callable[[Request], Awaitable[Response]]:
        """``handler`` for callers with a key; whatever it raises becomes an answer."""

        async def answer(request: Request) -> Response:
            try:
                tenant = self._tenant(request)
            except RequestRefusedError as error:
                return self.refusal(error)
            try:
                response = await handler(self, request, tenant)
            except MegascendError as error:
                refused = error if isinstance(error, RequestRefusedError) else RequestRefusedError(str(error), 400)
                self._note(request, tenant, refused)
                response = self.refusal(refused)
            address = request.client.host if request.client is not None else ""
            self.audit.write(tenant, request.method, request.url.path, response.status_code, address)
            return response

        return answer

    def _tenant(self, request: Request) -> str:
        """Whose key a request has."""
        tenant = self._keys.tenant(request.headers.get("x-api-key", "").encode("ascii", "replace").decode())
        if tenant is None:
            raise RequestRefusedError("a valid API key is needed (TINKER_API_KEY)", 401)
        return tenant

    def _note(self, request: Request, tenant: str, error: RequestRefusedError) -> None:
        """Show a refusal among the tenant's errors, if it is for a fault in the request: others pass, or clients expect them."""
        if error.status in (400, 413, 415, 422):
            kind = request.url.path.rsplit("/", 1)[-1][:80]
            self.service.figures.note(tenant, Problem(self.service.clock(), kind, "", "user", str(error)))

    def refusal(self, error: RequestRefusedError) -> Response:
        """The answer to a request that is not done."""
        self.service.figures.refuse(error.status)
        headers = {"retry-after": "1"} if error.status == 429 else {}
        category = "user" if error.status < 500 else "server"
        return JSONResponse({"detail": str(error), "category": category}, error.status, headers)

    # --- sessions and models ---

    async def client_config(self, request: Request, tenant: str) -> Response:
        limits = self.service.settings.limits
        chunk = min(5_000_000, limits.body_bytes // 4)
        return JSONResponse({
            "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": True,
            "fwdbwd_max_chunk_len": min(1024, limits.samples), "fwdbwd_max_chunk_bytes_count": chunk,
        })  # fmt: skip

    async def create_session(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        session = self.service.tenancy.open_session(tenant, metadata_of(body))
        answer: dict[str, Any] = {"type": "create_session", "session_id": session.name}
        if not self.service.base.adapts_output:
            answer["warning_message"] = (
                "the output layer of this server's model is not adapted: train_unembed has no effect"
            )
        return JSONResponse(answer)

    async def heartbeat(self, request: Request, tenant: str) -> Response:
        self.service.tenancy.session((await read_json(request, self._most)).get("session_id"), tenant)
        return JSONResponse({"type": "session_heartbeat"})

    async def create_model(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        session = self.service.tenancy.session(body.get("session_id"), tenant)
        wanted = lora_of(body)
        number = integer(body, "model_seq_id")
        return _promised(self.service.create_model(tenant, session, number, wanted, metadata_of(body)))

    async def unload_model(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        return _promised(self.service.unload(self.service.tenancy.model(body.get("model_id"), tenant)))

    async def get_info(self, request: Request, tenant: str) -> Response:
        model, base = (
            self.service.tenancy.model((await read_json(request, self._most)).get("model_id"), tenant),
            self.service.base,
        )
        data = {"arch": base.architecture, "model_name": base.names[0], "tokenizer_id": base.names[0]}
        return JSONResponse({
            "type": "get_info", "model_id": model.name, "model_name": base.names[0], "model_data": data,
            "is_lora": True, "lora_rank": model.rank,
        })  # fmt: skip

    async def capabilities(self, request: Request, tenant: str) -> Response:
        base = self.service.base
        found = [
            {"model_name": name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
            for name in base.names
        ]
        return JSONResponse({"supported_models": found})

    # --- training ---

    async def forward_backward(self, request: Request, tenant: str, *, forward_only: bool = False) -> Response:
        most = self.service.settings.limits.samples
        if PROTOBUF in request.headers.get("content-type", ""):
            wanted = await asyncio.to_thread(train_request_of_protobuf, await read_body(request, self._most), most)
        else:
            wanted = train_request_of_json(await read_json(request, self._most), most, forward_only=forward_only)
        return _promised(self.service.train(tenant, wanted))

    async def forward(self, request: Request, tenant: str) -> Response:
        return await self.forward_backward(request, tenant, forward_only=True)

    async def optim_step(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        model = self.service.tenancy.model(body.get("model_id"), tenant)
        settings = body.get("adam_params") or body.get("optimizer_params") or body.get("optim_params") or {}
        settings = settings if isinstance(settings, dict) else {"learning_rate": settings}
        return _promised(self.service.optim_step(model, number_of(body.get("seq_id")), settings))

    async def save_weights(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        model = self.service.tenancy.model(body.get("model_id"), tenant)
        return _promised(saving.save(self.service, model, body, "weights"))

    async def save_weights_for_sampler(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        model = self.service.tenancy.model(body.get("model_id"), tenant)
        return _promised(saving.save(self.service, model, body, "sampler_weights"))

    async def load_weights(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        if body.get("session_id") is not None:
            session = self.service.tenancy.session(body["session_id"], tenant)
            return _promised(saving.load_new(self.service, session, body))
        model = self.service.tenancy.model(body.get("model_id"), tenant)
        return _promised(saving.load_into(self.service, model, body))

    # --- sampling ---

    async def create_sampling_session(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        session = self.service.tenancy.session(body.get("session_id"), tenant)
        path = None if body.get("model_path") is None else text(body, "model_path")
        name = sampler_name(session.name, integer(body, "sampling_session_seq_id"))
        if path is not None:
            self.service.checkpoints.find(tenant, saving.CheckpointPath.parse(path), public=True)
        session.samplers[name] = path
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def sampler(self, request: Request, tenant: str) -> Response:
        name = request.path_params["sampler"]
        session = self.service.tenancy.session(name.partition(":")[0], tenant)
        if name not in session.samplers:
            raise RequestRefusedError(f"there is no sampler {name[:120]!r}", 404)
        answer = {"sampler_id": name, "base_model": self.service.base.names[0], "model_path": session.samplers[name]}
        return JSONResponse(answer)

    async def asample(self, request: Request, tenant: str) -> Response:
        future = self._samplers.sample(tenant, await read_json(request, self._most))
        names = [f"{future.name}:{part}" for part in range(future.parts)]
        return JSONResponse({"request_id": future.name, "sample_sequence_ids": names})

    # --- answers ---

    async def retrieve_future(self, request: Request, tenant: str) -> Response:
        body = await read_json(request, self._most)
        future = await self.service.wait(tenant, body.get("request_id"), LONG_POLL_S)
        if future.ended is None:
            pending = {"type": "try_again", "request_id": future.name, "queue_state": "active"}
            return JSONResponse(pending, 408)
        if future.failure is not None:
            return JSONResponse({"error": future.failure.message, "category": future.failure.category})
        if not isinstance(future.answer, TrainAnswer | SampleAnswer):
            return JSONResponse(future.answer)
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(future.answer.protobuf), media_type=PROTOBUF)
        return Response(json.dumps(await asyncio.to_thread(future.answer.json)), media_type="application/json")

    async def telemetry(self, request: Request, tenant: str) -> Response:
        return JSONResponse({"status": "accepted"})  # nothing of it is kept

    async def health(self, request: Request) -> Response:
        """Healthy as soon as it answers; ready once the ranks have the model."""
        if request.url.path == "/readyz" and not self.service.ready:
            return JSONResponse({"status": "starting"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        service = self.service
        gauges = {
            "sessions": ("Sessions that are open.", float(len(service.tenancy.sessions))),
            "models": ("Models in training.", float(len(service.tenancy.models))),
        }
        found = service.figures.prometheus(gauges, service.futures.pending_by_kind())
        return PlainTextResponse(found, media_type="text/plain; version=0.0.4")

    async def status(self, request: Request) -> Response:
        """What the page shows; totals alone for a request without a key."""
        try:
            tenant = self._tenant(request) if "x-api-key" in request.headers else None
        except RequestRefusedError as error:
            return self.refusal(error)
        return JSONResponse(status(self.service, tenant), headers={"cache-control": "no-store"})


async def _of_service(handle: Listing, api: Api, request: Request, tenant: str) -> Response:
    return await handle(api.service, request, tenant)


def _promised(future: Future) -> Response:
    return JSONResponse({"request_id": future.name, "model_id": future.model})


def make_application(service: Service, keys: Keys) -> Starlette:
    """The application of a service.

    Args:
        keys: who may use it.
    """
    api = Api(service, keys)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async def ticking() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                service.tick()

        task = asyncio.create_task(ticking())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            api.audit.close()

    async def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return JSONResponse({"detail": "not found" if status == 404 else "not allowed", "category": "user"}, status)

    return Starlette(routes=api.routes(), lifespan=lifespan, exception_handlers={404: not_found, 405: not_found})
