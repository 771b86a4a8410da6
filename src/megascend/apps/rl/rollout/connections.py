"""HTTP server with limits for slow, silent, or too many connections, which uvicorn does not enforce.

An asyncio protocol around uvicorn's sees the bytes and the transport, and an ASGI middleware sees the requests. A context
variable links a request to its connection: a task inherits the context in which it was created.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEAD_S = 20.0
"""Deadline for the head of a request, from the connection or the end of the last answer, in seconds."""

WRITE_S = 30.0
"""Longest time for which a client may read nothing of a pending answer, in seconds."""

OWNER = "megascend.tenant"
"""Key in a request's scope: the tenant that authenticated it."""

_connection: ContextVar[BoundedProtocol] = ContextVar("megascend connection")


class BoundedServer(uvicorn.Server):
    """uvicorn server of one application, with bounded connections, that leaves signals to its program.

    Args:
        max_connections: maximum number of connections. uvicorn's ``limit_concurrency`` would refuse requests regardless of their
            owner.
    """

    def __init__(self, application: ASGIApp, max_connections: int, **options: Any) -> None:
        config = uvicorn.Config(
            _reporting(application), http="h11", ws="none", access_log=False, server_header=False, **options
        )
        config.load()  # sets the class of uvicorn's protocol
        # uvicorn constructs its protocol with arguments of its own, so the limits are attributes of a class made for this server.
        bounds = {"inner": config.http_protocol_class, "limit": max_connections, "connections": set()}
        config.http_protocol_class = type("Bounded", (BoundedProtocol,), bounds)
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would replace the program's handlers of SIGINT and SIGTERM, and raise the signal again at its end.
        yield


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket for a server. uvicorn calls ``sys.exit()`` if the port is taken.

    Args:
        host: name or address of an interface; of a name with addresses of both families, IPv4's is used. Empty: all.
        port: 0: any free one.

    Raises:
        OSError: the port is taken, or the host is not an address of this machine.
    """
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # With its protocol: asyncio disables Nagle's algorithm only for IPPROTO_TCP, and without that every answer takes
    # 40 ms longer.
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    listening = socket.socket(family, kind, protocol)
    try:
        # So that a server that is started again gets its port while the kernel still keeps closed connections of the last one.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


class BoundedProtocol(asyncio.Protocol):
    """HTTP/1.1 protocol that closes connections whose client neither completes a request nor reads its answer.

    uvicorn closes only a connection that is silent after an answer: a client that never completes the head of a request, or never
    reads, could keep it forever. An answer that is read slowly but steadily is sent to its end. The body of a request has a
    deadline of its own, enforced by its reader.

    Attributes:
        limit: maximum number of connections. uvicorn's ``limit_concurrency`` would refuse requests regardless of their owner.
        connections: all open ones, including this one.
        since: time at which this one was opened.
    """

    inner: Callable[..., asyncio.Protocol]
    limit: int
    connections: set[BoundedProtocol]

    def __init__(self, **options: Any) -> None:
        # uvicorn's own protocol does the work; this class stands between it and the transport and only keeps time.
        self._http = self.inner(**options)
        self._answering = 0
        self._scope: MutableMapping[str, Any] = {}
        self._head_timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._unread: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._loop, self._transport = asyncio.get_running_loop(), transport
        self.since, self._peer = self._loop.time(), transport.get_extra_info("peername")
        self.connections.add(self)
        self._http.connection_made(transport)
        self._read_timer = self._loop.call_later(WRITE_S, self._check_reading)
        self._await_head()
        if len(self.connections) > self.limit:
            # Only now: the new one counts too, and may be the one that is closed.
            choose_victim(self.connections)._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._read_timer.cancel()
        self._stop_awaiting()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # uvicorn creates the request's task within this call, and a task inherits the variable.
        token = _connection.set(self)
        try:
            self._http.data_received(data)
        finally:
            _connection.reset(token)
        if self.idle:  # an incomplete head, or the body of a request that was answered already
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
        """Return the owner: the tenant that authenticated the last request, or else the client's address."""
        tenant = self._scope.get(OWNER)
        return f"tenant {tenant}" if tenant else f"address {self._peer[0] if self._peer else ''}"

    @property
    def idle(self) -> bool:
        return self._answering == 0

    def begin(self, scope: Scope) -> None:
        """Record the start of an answer."""
        self._answering += 1
        self._scope = scope
        self._stop_awaiting()

    def end(self, *, body_ended: bool) -> None:
        """Record the end of an answer.

        Args:
            body_ended: the request's body was received completely.
        """
        self._answering -= 1
        if self.idle and not body_ended and not self._transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        if self._head_timer is None:
            # Further bytes do not start it again: a client that sends one now and then would keep its connection for ever.
            self._head_timer = self._loop.call_later(HEAD_S, self._drop)

    def _stop_awaiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_reading(self) -> None:
        """End the connection if data is pending and the client has read nothing since the last call."""
        before, self._unread = self._unread, None
        # Only while data is waiting: a connection that has nothing to send owes no progress.
        if self._paused or self._transport.is_closing():
            self._unread = self._transport.get_write_buffer_size()
            # Nothing was read in a whole interval; a client that reads slowly makes progress.
            if before is not None and self._unread >= before:
                self._drop()
                return
        self._read_timer = self._loop.call_later(WRITE_S, self._check_reading)

    def _drop(self) -> None:
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            # SO_LINGER 0 discards unsent data, which the kernel would otherwise keep for a client that does not read.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Not close(), which would wait until the client has read everything.
        self._transport.abort()
        # connection_lost() follows in a later turn of the loop, and until then this one would count against the limit.
        self.connections.discard(self)


def _reporting(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that connections know whether they are answering a request."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        connection = _connection.get(None)
        if connection is None or scope["type"] != "http":
            await app(scope, receive, send)
            return
        # A request without a body has ended with its head.
        headers = dict(scope["headers"])
        body_ended = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

        # A client answered before its body has ended may keep sending: the deadline for a head covers that, too.
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


def choose_victim(connections: Iterable[BoundedProtocol]) -> BoundedProtocol:
    """Return the connection to close if there are too many: one of the owner with the most.

    So no owner can occupy all of them. The oldest idle one is closed first, otherwise the newest busy one. Of owners with equally
    many, the one with the oldest connection is chosen.
    """
    by_owner: dict[str, list[BoundedProtocol]] = {}
    for connection in sorted(connections, key=lambda connection: connection.since):
        by_owner.setdefault(connection.owner, []).append(connection)
    candidates = max(by_owner.values(), key=len)  # the first of equally long ones
    return next((connection for connection in candidates if connection.idle), candidates[-1])
