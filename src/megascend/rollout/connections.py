"""Connections of clients that are slow, silent, or too many: bounds that uvicorn does not set.

An asyncio protocol around uvicorn's, which sees the bytes and the transport, and an ASGI middleware, which sees the requests. A
context variable leads from these to the connection they came by: a task has the context that it was created in.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""How long a client may take to send the head of a request, the first one's connection included."""

WRITE_S = 30.0
"""How long a client may read nothing of an answer that waits for it."""

OWNER = "megascend.tenant"
"""In a request's scope: the tenant whose key it has."""

_connection: ContextVar[BoundedProtocol] = ContextVar("megascend connection")


class BoundedProtocol(asyncio.Protocol):
    """HTTP/1.1 in which a client cannot hold a connection without asking for something and taking its answer.

    uvicorn closes a connection that is silent after an answer, and nothing else: one that never sends the whole head of a
    request, or never reads, is there as long as its client likes. What is read slowly, but steadily, is sent to its end. The body
    of a request has a time limit of its own (the reader of the body).

    Attributes:
        most: connections at a time. uvicorn's ``limit_concurrency`` would refuse requests whosever they are.
        others: that are open, this one included.
        since: when this one was made.
    """

    most: int
    others: set[BoundedProtocol]

    def __init__(self, **options: Any) -> None:
        self._http = H11Protocol(**options)
        self._answering = 0
        self._scope: MutableMapping[str, Any] = {}
        self._head_timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._unread: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._loop, self._transport = asyncio.get_running_loop(), transport
        self.since, self._peer = self._loop.time(), transport.get_extra_info("peername")
        self.others.add(self)
        self._http.connection_made(transport)
        self._read_timer = self._loop.call_later(WRITE_S, self._check_reading)
        self._await_head()
        if len(self.others) > self.most:
            others = list(self.others)
            others[makes_room([Held(each.owner, each.idle, each.since) for each in others])]._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self.others.discard(self)
        self._read_timer.cancel()
        self._stop_awaiting()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        token = _connection.set(self)
        try:
            self._http.data_received(data)
        finally:
            _connection.reset(token)
        if self.idle:  # a head that has begun, or a body whose request is answered already
            self._await_head()

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._paused = True
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._paused, self._unread = False, None
        self._http.resume_writing()

    @property
    def owner(self) -> str:
        """Whose connection this is: the tenant's whose key its last request had, or else its address's."""
        tenant = self._scope.get(OWNER)
        return f"tenant {tenant}" if tenant else f"address {self._peer[0] if self._peer else ''}"

    @property
    def idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self._answering == 0

    def begin(self, scope: Scope) -> None:
        """Note that a request is being answered."""
        self._answering += 1
        self._scope = scope
        self._stop_awaiting()

    def end(self, *, body_ended: bool) -> None:
        """Note that a request was answered.

        Args:
            body_ended: nothing of it is still to come.
        """
        self._answering -= 1
        if self.idle and not body_ended and not self._transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_S, self._drop)

    def _stop_awaiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_reading(self) -> None:
        """End the connection if it waits for its client to read, who has read nothing since the last time this was called."""
        before, self._unread = self._unread, None
        if self._paused or self._transport.is_closing():
            self._unread = self._transport.get_write_buffer_size()
            if before is not None and self._unread >= before:
                self._drop()
                return
        self._read_timer = self._loop.call_later(WRITE_S, self._check_reading)

    def _drop(self) -> None:
        """End the connection with what was not sent, which otherwise the kernel would keep for a client that does not read."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
        self.others.discard(self)


def bounded(most: int) -> type[BoundedProtocol]:
    """Return the protocol of a server that has up to so many connections."""
    return type("Bounded", (BoundedProtocol,), {"most": most, "others": set()})


def reporting(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that connections know which of their requests are being answered."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        connection = _connection.get(None)
        if connection is None or scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        body_ended = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

        async def receive_noting_end() -> Message:
            nonlocal body_ended
            message = await receive()
            body_ended = body_ended or not message.get("more_body", False)
            return message

        connection.begin(scope)
        try:
            await app(scope, receive_noting_end, send)
        finally:
            connection.end(body_ended=body_ended)

    return call


@dataclass(frozen=True)
class Held:
    """A connection that is open.

    Attributes:
        owner: whose it is.
        idle: no request of it is being answered.
        since: when it was made.
    """

    owner: str
    idle: bool
    since: float


def makes_room(held: Sequence[Held]) -> int:
    """Choose the connection to close where there are too many: one of the owner with the most, so that nobody can take them all.

    Idle ones go first, the oldest of them; of others, the newest. Of owners with equally many, one that has an older connection.
    """
    count = Counter(each.owner for each in held)
    most = max(count.values())
    first: dict[str, float] = {}
    for each in held:
        first[each.owner] = min(each.since, first.get(each.owner, each.since))
    owner = min((owner for owner in count if count[owner] == most), key=lambda owner: first[owner])
    mine = [number for number, each in enumerate(held) if each.owner == owner]
    idle = [number for number in mine if held[number].idle]
    if idle:
        return min(idle, key=lambda number: held[number].since)
    return max(mine, key=lambda number: held[number].since)
