"""What stands in front of vLLM's HTTP server: who may call what, our own routes, and the versions of answers.

``vllm serve --middleware weightwire.vllm.guard.Guard``; ``python -m weightwire.vllm`` does so. Inference and health stay as
open as vLLM has them (``--api-key``). Every other path needs a signature with the job's key, or its bearer token, also those that
vLLM leaves open under ``VLLM_SERVER_DEV_MODE``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightwire.auth import Grant, Verifier, sign_answer
from weightwire.errors import AuthError, NotServingError, WireError, to_json
from weightwire.keys import Key, load_key
from weightwire.offer import Offer, Seal
from weightwire.vllm import generation
from weightwire.vllm.control import Control

log = logging.getLogger(__name__)

PREFIX = "/weightwire/"
BEARER = "vllm control"
"""The purpose of the token for callers that cannot sign: ``load_key().bearer_token(BEARER)``."""
OPEN = ("/v1/", "/v2/", "/inference/", "/cohere/", "/tokenize", "/detokenize")
ALWAYS_OPEN = ("/health", "/ping", "/version", "/metrics", "/load")
"""Also while the engine does not serve, but for ``/health``."""
CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests")
MOST_BODY = 64 * 2**20
BODY_S = 30.0
"""Seconds that a caller has for its body."""
STATUS = {
    "AuthError": 401,
    "ManifestError": 400,
    "OwnerError": 409,
    "VersionError": 409,
    "UpdateError": 409,
    "NotServingError": 503,
    "CommitError": 500,
    "WireError": 400,
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded.
        key: default: from the environment (:func:`weightwire.keys.load_key`).

    Raises:
        SecretKeyError: there is no key: nothing is served without one.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], key: Key | None = None) -> None:
        self._app = app
        self._key = load_key(key)
        self._verifier = Verifier(self._key, bearer=BEARER)
        self._control: Control | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
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
                grant = self._check(scope)
                body = await _body(receive)
                grant.check_body(body)
            except WireError as error:
                await self._refuse(error, scope, send)
                return
            await self._app(scope, _replay(body, receive), send)

    def _check(self, scope: Scope) -> Grant:
        headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) > 1:
            raise AuthError("the request has more than one header Authorization")
        query = scope.get("query_string", b"").decode("latin-1")
        target = scope.get("raw_path", scope["path"].encode()).decode("latin-1").split("?", 1)[0]
        return self._verifier.check_head(
            scope["method"], target + (f"?{query}" if query else ""), headers[0] if headers else None
        )

    async def _pass_on(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """To vLLM's own route. An answer tells the versions in force when its request came and when the answer began."""
        control = self._control_of(scope)
        if control.not_serving is not None and (_is_open(path) or path == "/health"):
            await self._refuse(NotServingError(control.not_serving), scope, send)
            return
        before = control.version()

        async def with_versions(message: Message) -> None:
            if message["type"] == "http.response.start":
                versions = ((b"x-weight-version-first", before), (b"x-weight-version-last", control.version()))
                own = [(name, str(value).encode()) for name, value in versions]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        await self._app(scope, receive, with_versions)

    def _control_of(self, scope: Scope) -> Control:
        if self._control is None:
            state = scope["app"].state
            if getattr(getattr(state, "args", None), "api_server_count", 1) not in (None, 0, 1):
                raise WireError("owner and pauses are kept in one process: start vLLM with --api-server-count 1")
            self._control = Control(state.engine_client)
        return self._control

    # --- our own routes ---

    async def _answer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        nonce = ""
        try:
            grant = self._check(scope)
            nonce = grant.nonce
            body = await _body(receive)
            grant.check_body(body)
            fields = _fields(body)
            route = _ROUTES.get(name)
            if route is None or scope["method"] != "POST":
                raise WireError(f"there is no POST {PREFIX}{name[:80]}; there are: {', '.join(sorted(_ROUTES))}")
            work = asyncio.ensure_future(route(self._control_of(scope), scope["app"].state, fields))
            if name in _MAY_BE_CANCELLED:
                answer = await _unless_gone(work, receive)
            else:  # goes on without its caller, whose connection may break
                answer = await asyncio.shield(work)
        except WireError as error:
            await self._refuse(error, scope, send, nonce)
        except Exception as error:
            log.exception("%s failed", name)
            await self._refuse(WireError(f"{name}: {type(error).__name__}: {error}"), scope, send, nonce, 500)
        else:
            if answer is not None:
                await self._send(200, answer, send, nonce)

    async def _refuse(
        self, error: WireError, scope: Scope, send: Send, nonce: str = "", status: int | None = None
    ) -> None:
        if isinstance(error, AuthError):
            log.warning("%s %s from %s refused: %s", scope["method"], scope["path"], scope.get("client"), error)
        kinds = (kind.__name__ for kind in type(error).__mro__)
        await self._send(
            status or next((STATUS[kind] for kind in kinds if kind in STATUS), 500), to_json(error), send, nonce
        )

    async def _send(self, status: int, answer: dict[str, Any], send: Send, nonce: str) -> None:
        body = json.dumps(answer).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if nonce:
            headers |= sign_answer(self._key, nonce, status, body)
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})


# --- what each route takes from its body ---


async def _info(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return await control.info()


async def _claim(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    await control.claim(_take(fields, "owner", str), _seconds(fields, "lease_s"), _take(fields, "take_over", bool))
    return await control.info()


async def _release(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    control.release(_take(fields, "owner", str))
    return {}


async def _begin(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    await control.begin(_take(fields, "owner", str), Offer.from_json(fields.get("offer")))
    return {}


async def _verify(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    seal = Seal.from_json(fields.get("seal"))
    await control.verify(_take(fields, "owner", str), seal, _seconds(fields, "timeout_s"))
    return {}


async def _commit(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    await control.commit(_take(fields, "owner", str), _take(fields, "update", str))
    _show_adapters(control, state)
    return {}


async def _drop(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    await control.drop(_take(fields, "owner", str), _take(fields, "update", str))
    return {}


async def _pause(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    await control.pause(_take(fields, "owner", str), _seconds(fields, "lease_s"))
    return {}


async def _resume(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    await control.resume(_take(fields, "owner", str))
    return {}


async def _load_adapter(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    version = fields.get("version")
    if version is not None:
        version = _take(fields, "version", int)
    await control.load_adapter(
        _take(fields, "owner", str), _take(fields, "name", str), _take(fields, "path", str), version
    )
    _show_adapters(control, state)
    return {}


async def _generate(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    fields.pop("owner", None)
    adapter = control.adapter(fields.pop("adapter", None))
    completions = await _serving(control, generation.generate(state.engine_client, fields, adapter, control.version))
    return {"completions": completions}


async def _logprobs(control: Control, state: Any, fields: dict[str, Any]) -> dict[str, Any]:
    adapter = control.adapter(fields.pop("adapter", None))
    values = await _serving(control, generation.logprobs(state.engine_client, fields.get("tokens"), adapter))
    return {"logprobs": values}


async def _serving(control: Control, work: Any) -> Any:
    if control.not_serving is None:
        result = await work
        if control.not_serving is None:
            return result
    else:
        work.close()
    raise NotServingError(control.not_serving)


_ROUTES: dict[str, Callable[[Control, Any, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "info": _info,
    "claim": _claim,
    "release": _release,
    "begin": _begin,
    "verify": _verify,
    "commit": _commit,
    "drop": _drop,
    "pause": _pause,
    "resume": _resume,
    "load_adapter": _load_adapter,
    "generate": _generate,
    "logprobs": _logprobs,
}
_MAY_BE_CANCELLED = {"generate", "logprobs", "info"}


def _show_adapters(control: Control, state: Any) -> None:
    """Let ``/v1`` take the adapters by their names, each in the version in force."""
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
        raise WireError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise WireError("the body is no JSON object")
    return fields


def _take(fields: dict[str, Any], name: str, kind: type) -> Any:
    value: Any = fields.get(name)
    if type(value) is not kind or (kind is str and not 0 < len(value) <= 4096):
        raise WireError(f"{name} is {value!r:.80}; a {kind.__name__} was expected")
    return value


def _seconds(fields: dict[str, Any], name: str) -> float:
    value: Any = fields.get(name)
    if type(value) not in (int, float) or not 0 <= value < 1e6:
        raise WireError(f"{name} is {value!r:.80}; seconds were expected")
    return float(value)


async def _body(receive: Receive) -> bytes:
    """The request's body, of at most :data:`MOST_BODY` bytes, within :data:`BODY_S`."""
    try:
        return await asyncio.wait_for(_whole_body(receive), BODY_S)
    except asyncio.TimeoutError:
        raise WireError(f"the body did not arrive within {BODY_S:g} s") from None


async def _whole_body(receive: Receive) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise WireError("the caller is gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BODY:
            raise WireError(f"a body of more than {MOST_BODY} bytes")
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` that gives a body that was read once more."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _unless_gone(work: asyncio.Future[Any], receive: Receive) -> Any:
    """The result of ``work``, which is cancelled if the caller goes; then None."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, watch):
            task.cancel()
