"""ASGI requests that are authenticated by their head, before a byte of the body is read; their answers are signed.

:func:`check_head`, :func:`read_body`, :func:`finish` and :func:`send_json` are the steps of every such request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from weightwire.auth import Grant, Verifier, sign_answer
from weightwire.errors import AuthError, WireError
from weightwire.keys import Key

DISCARD_S = 1.0
"""Seconds for reading the rest of a refused request: a connection closed before that may lose the answer."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class LargeBodyError(WireError):
    """A request's body exceeds the limit."""


def target_of(scope: Scope) -> str:
    """Return the path and query of a request, as in its first line."""
    query = scope.get("query_string", b"").decode("latin-1")
    # The caller signs the bytes of the first line, before percent-decoding.
    target = scope.get("raw_path", scope["path"].encode()).decode("latin-1").split("?", 1)[0]
    return target + (f"?{query}" if query else "")


def check_head(verifier: Verifier, scope: Scope) -> Grant:
    """Verify a request, whose nonce is then used up."""
    headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
    # Servers differ in which of two headers they take.
    if len(headers) > 1:
        raise AuthError("the request has more than one Authorization header")
    return verifier.check_head(scope["method"], target_of(scope), headers[0] if headers else None)


async def read_body(
    receive: Receive, max_bytes: int, timeout_s: float, charge: Callable[[int], object] = lambda size: None
) -> bytes:
    """Return a request's body.

    Args:
        charge: called with the size of each part as it arrives; may raise.

    Raises:
        LargeBodyError: it has more than ``max_bytes``.
        WireError: it did not arrive within ``timeout_s`` seconds, or its caller is gone.
    """
    try:
        return await asyncio.wait_for(_read_parts(receive, max_bytes, charge), timeout_s)
    except asyncio.TimeoutError:
        raise WireError(f"the body did not arrive within {timeout_s:g} s") from None


async def _read_parts(receive: Receive, max_bytes: int, charge: Callable[[int], object]) -> bytes:
    # Not a list of parts: a client may send single bytes, whose objects take 34 times as much memory.
    body, unfinished = bytearray(), True
    while unfinished:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise WireError("the caller is gone")
        # Counted as it arrives: Content-Length may be missing, or wrong.
        part = message.get("body", b"")
        if len(body) + len(part) > max_bytes:
            raise LargeBodyError(f"the body has more than {max_bytes} bytes")
        charge(len(part))
        body += part
        unfinished = message.get("more_body", False)
    return bytes(body)


async def finish(call: Coroutine[Any, Any, Any], receive: Receive, *, with_caller: bool) -> Any:
    """Return the result of a call.

    Args:
        with_caller: cancel it when its caller disconnects, and return None; otherwise it is completed without its caller.
    """
    work = asyncio.ensure_future(call)
    if not with_caller:
        return await asyncio.shield(work)

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    # The server reports a disconnect only to an application that is receiving.
    watch = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, watch):
            task.cancel()


async def send_json(
    send: Send, status: int, body: bytes, key: Key, nonce: str = "", *, close: bool = False, rest: Receive | None = None
) -> None:
    """Send an answer.

    Args:
        body: JSON.
        nonce: of the request, over which the answer is signed; empty: it is not.
        close: the connection ends with it.
        rest: ``receive`` of a request that was not read completely. Closing a connection with unread bytes resets it, and the
            caller may never see the answer; so they are discarded before.
    """
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if close:
        headers["connection"] = "close"
    if nonce:
        headers |= sign_answer(key, nonce, status, body)
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": rest is not None})
    if rest is not None:
        with contextlib.suppress(asyncio.TimeoutError):
            # Bounded: the caller may send slowly, or for ever.
            await asyncio.wait_for(_discard(rest), DISCARD_S)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
        pass
