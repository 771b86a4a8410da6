"""ASGI middleware before vLLM's HTTP server: authentication, our own routes, and weight versions of answers.

Used as ``vllm serve --middleware weightwire.vllm.guard.Guard``, which ``python -m weightwire.vllm`` sets. Access to inference and
health routes is left to vLLM (``--api-key``). Every other path needs a signature with the job's key, or its bearer token,
including those that vLLM leaves open under ``VLLM_SERVER_DEV_MODE``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from weightwire.asgi import Message, Receive, Scope, Send, check_head, finish, read_body, send_json
from weightwire.auth import Verifier
from weightwire.errors import AuthError, InstanceError, NotServingError, WireError, to_json
from weightwire.keys import Key, load_key
from weightwire.remote_engine import AUDIENCE, CALLS, Arguments, read_call
from weightwire.vllm.control import LONGEST_LEASE_S, Control

log = logging.getLogger(__name__)

PREFIX = "/weightwire/"
BEARER = "vllm control"
"""The purpose of the token for callers that cannot sign: ``load_key().bearer_token(BEARER)``."""
OPEN = ("/v1/", "/v2/", "/inference/", "/cohere/", "/tokenize", "/detokenize")
ALWAYS_OPEN = ("/health", "/ping", "/version", "/metrics", "/load")
"""Paths that are answered even while the engine does not serve, except ``/health``."""
CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests")
MAX_BODY = 64 * 2**20
BODY_S = 30.0
"""Deadline for a request's body, in seconds."""
STATUS = {
    "AuthError": 401,
    "ManifestError": 400,
    "PlanError": 409,
    "OwnerError": 409,
    "VersionError": 409,
    "UpdateError": 409,
    "NotServingError": 503,
    "CommitError": 500,
    "WireError": 400,
}

OWN_ROUTES = ("info", "claim", "release")
"""Routes in addition to the calls of the contract."""


class Guard:
    """ASGI middleware.

    Args:
        app: the guarded application.
        key: default: from the environment (:func:`weightwire.keys.load_key`).

    Raises:
        SecretKeyError: the key is missing: nothing is served without one.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], key: Key | None = None) -> None:
        self._app = app
        self._key = load_key(key)
        self._verifier = Verifier(self._key, audience=AUDIENCE, bearer=BEARER)
        # Created at the first request, whose scope leads to vLLM's engine client.
        self._control: Control | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        # Messages of a websocket are not signed as a request's body is.
        if scope["type"] == "websocket":
            if _is_open(path):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif path.startswith(PREFIX):
            await self._answer(path.removeprefix(PREFIX), scope, receive, send)
        elif _is_open(path) or path.rstrip("/") in ALWAYS_OPEN:
            await self._pass_on(path, scope, receive, send)
        else:
            try:
                grant = check_head(self._verifier, scope)
                body = await read_body(receive, MAX_BODY, BODY_S)
                grant.check_body(body)
            except WireError as error:
                await self._refuse(error, scope, send)
                return
            await self._app(scope, _replay(body, receive), send)

    async def _pass_on(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward to vLLM's route, and add the versions active at the start of the request and of the answer."""
        control = self._control_of(scope)
        if control.not_serving is not None and (_is_open(path) or path == "/health"):
            await self._refuse(NotServingError(control.not_serving), scope, send)
            return
        # Taken at both ends: an update may become active while the answer is computed.
        before = control.active_version()

        async def with_versions(message: Message) -> None:
            # A streamed answer's headers precede its body: its last version is the one of that moment.
            if message["type"] == "http.response.start":
                versions = ((b"x-weight-version-first", before), (b"x-weight-version-last", control.active_version()))
                added = [(name, str(value).encode()) for name, value in versions]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await self._app(scope, receive, with_versions)

    def _control_of(self, scope: Scope) -> Control:
        if self._control is None:
            state = scope["app"].state
            # Processes of several API servers would each have an owner of their own.
            if getattr(getattr(state, "args", None), "api_server_count", 1) not in (None, 0, 1):
                raise WireError("owner and pauses are kept in one process: start vLLM with --api-server-count 1")
            self._control = Control(state.engine_client)
        return self._control

    # --- our own routes ---

    async def _answer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        nonce = ""
        try:
            grant = check_head(self._verifier, scope)
            # From here on errors are signed too, so that the caller can trust a refusal.
            nonce = grant.nonce
            body = await read_body(receive, MAX_BODY, BODY_S)
            grant.check_body(body)
            fields = _fields(body)
            if name not in (*OWN_ROUTES, *CALLS) or scope["method"] != "POST":
                raise WireError(f"there is no POST {PREFIX}{name[:80]}; known: {', '.join((*OWN_ROUTES, *CALLS))}")
            call = self._call(name, self._control_of(scope), scope["app"].state, fields)
            # One that changes the engine completes without its caller, whose connection may break.
            answer = await finish(call, receive, with_caller=name == "info" or (name in CALLS and CALLS[name].samples))
        except WireError as error:
            await self._refuse(error, scope, send, nonce)
        except Exception as error:
            log.exception("%s failed", name)
            await self._refuse(WireError(f"{name}: {type(error).__name__}: {error}"), scope, send, nonce, 500)
        else:
            if answer is not None:
                await send_json(send, 200, json.dumps(answer).encode(), self._key, nonce)

    async def _call(self, name: str, control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
        """Answer a route."""
        if name == "info":
            return await control.info()
        caller = Arguments(name, {key: fields.pop(key) for key in ("owner", "claim") if key in fields})
        run = read_call(name, fields) if name in CALLS else None
        if run is not None and CALLS[name].reads:
            return await run(control)
        owner = caller.text("owner")
        if name == "release":
            control.release(owner)
            return {}
        claim = fields if run is None else caller.take("claim", None)
        if claim is not None:
            lease = Arguments(f"{name}: claim", _mapping(claim))
            await control.claim(owner, lease.number("lease_s", LONGEST_LEASE_S), lease.flag("take_over", False))
        if run is None:
            return {}
        async with control.owned(owner):
            answer = await run(control)
        # vLLM's own routes find an adapter by its name only in this table.
        if name in ("commit", "load_adapter"):
            _show_adapters(control, state)
        return answer

    async def _refuse(
        self, error: WireError, scope: Scope, send: Send, nonce: str = "", status: int | None = None
    ) -> None:
        answer = to_json(error)
        # The first request of every caller; the answer tells it how to sign the next.
        if isinstance(error, InstanceError):
            nonce, answer["instance"] = error.nonce, self._verifier.instance
        # Logged here alone: other errors reach a caller who has the key.
        elif isinstance(error, AuthError):
            log.warning("%s %s from %s refused: %s", scope["method"], scope["path"], scope.get("client"), error)
        # The most specific class first, as its bases may be in the table too.
        kinds = (kind.__name__ for kind in type(error).__mro__)
        status = status or next((STATUS[kind] for kind in kinds if kind in STATUS), 500)
        await send_json(send, status, json.dumps(answer).encode(), self._key, nonce)


def _show_adapters(control: Control, state: Any) -> None:
    """Register the adapters, each in its active version, for use by name in ``/v1``."""
    models = getattr(state, "openai_serving_models", None)
    if models is not None:
        for name, adapter in control.adapters.items():
            models.lora_requests[name] = adapter.request()


def _is_open(path: str) -> bool:
    return path.startswith(OPEN) and not path.startswith(CLOSED)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not valid JSON: {str(error)[:200]}") from None
    return _mapping(fields)


def _mapping(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise WireError("the body is not a JSON object")
    return fields


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first replays a body that was already read."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        # vLLM's routes wait for a disconnect after the body; that still comes from the server.
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
