"""HTTP/1.1 as far as the controller needs it, bounded in every direction.

h11 reads and writes the protocol and does no input or output; sockets, deadlines and bounds are here. One request a
connection: nothing is pipelined, and no idle connection holds a place. Callers are known by the head of their request
(:meth:`Service.admit`) before a byte of the body is read. Those not yet known share ``max_unknown`` places; when these are
taken, the one that has been there longest is cut off, so that slow callers never keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import h11

from megascend.rollout.http_client import Answer

C = TypeVar("C")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the server.

    Attributes:
        max_unknown: connections of callers that are not known yet.
        max_known: requests of known callers at a time, those that wait for their answer included.
        max_head_bytes: first line and headers.
        max_body_bytes: of one request.
        max_buffered_bytes: bodies of all requests together.
        head_timeout_s: what a caller has to send the head, in seconds; ``body_timeout_s`` to send the body, and
            ``send_timeout_s`` to take the answer.
    """

    max_unknown: int = 128
    max_known: int = 512
    max_head_bytes: int = 16 * 2**10
    max_body_bytes: int = 32 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 30.0


class Refusal(Exception):
    """A request that is answered with a status and a reason, and nothing else."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Service(Protocol[C]):
    """What answers requests. ``C`` is what it knows of an admitted caller."""

    def admit(self, method: str, target: str, authorization: str | None) -> C:
        """Know the caller from the head of the request, or raise :class:`Refusal`."""
        ...

    async def answer(self, caller: C, method: str, target: str, body: bytes) -> Answer:
        """Answer an admitted request. Raises nothing."""
        ...

    def refuse(self, caller: C | None, refusal: Refusal) -> Answer:
        """The answer to a request that is refused here."""
        ...

    def sign(self, caller: C, answer: Answer) -> dict[str, str]:
        """Headers of an answer to an admitted request."""
        ...


class HttpServer(Generic[C]):
    """Serves one :class:`Service` on one socket."""

    def __init__(self, service: Service[C], limits: HttpLimits | None = None) -> None:
        self._service = service
        self._limits = limits or HttpLimits()
        self._unknown: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._known = 0
        self._buffered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that the system chose if ``port`` is 0.

        Raises:
            OSError: the port is taken, or the host is not of this machine.
        """
        self._server = await asyncio.start_server(self._accept, host, port, limit=2**16, backlog=1024)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def stop_listening(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def close(self, grace_s: float = 1.0) -> None:
        """Take no more connections, give those that are there a moment for their answer, and end them."""
        await self.stop_listening()
        for writer in list(self._unknown):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writer.transport.set_write_buffer_limits(high=0)  # drain() then means: taken by the system
        self._unknown[writer] = None
        if len(self._unknown) > self._limits.max_unknown:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.transport.abort()
        try:
            await _Connection(self, reader, writer).serve()
        except (OSError, EOFError, asyncio.TimeoutError, h11.ProtocolError) as error:
            log.debug("a caller was cut off: %s: %s", type(error).__name__, error)
        except asyncio.CancelledError:
            log.debug("a caller was cut off: the server is closing")
        finally:
            self._unknown.pop(writer, None)
            self._tasks.discard(task)
            writer.transport.abort()  # what was to be sent has been; nobody waits for a slow peer


class _Connection(Generic[C]):
    """One request and its answer."""

    def __init__(self, server: HttpServer[C], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._limits = server._limits
        self._service = server._service
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.max_head_bytes)

    async def serve(self) -> None:
        try:
            request = await asyncio.wait_for(self._head(), self._limits.head_timeout_s)
        except h11.RemoteProtocolError as error:
            await self._refuse(None, Refusal(error.error_status_hint, "this is not HTTP/1.1 as we take it"))
            return
        method, target = request.method.decode("ascii"), request.target.decode("ascii")
        try:
            caller = self._service.admit(method, target, _only(request, b"authorization"))
        except Refusal as refusal:
            await self._refuse(None, refusal)
            return
        self._server._unknown.pop(self._writer, None)
        try:
            with self._room(request) as size:
                body = await asyncio.wait_for(self._body(size), self._limits.body_timeout_s)
                answer = await self._service.answer(caller, method, target, body)
        except Refusal as refusal:
            await self._refuse(caller, refusal)
            return
        await self._send(answer, self._service.sign(caller, answer))

    @contextlib.contextmanager
    def _room(self, request: h11.Request) -> Iterator[int]:
        """Hold a place for a request, and memory for its body, whose size is yielded.

        Raises:
            Refusal: there is none.
        """
        limits, server = self._limits, self._server
        if _only(request, b"transfer-encoding") is not None:
            raise Refusal(411, "the body's length must be in the header Content-Length")
        size = int(_only(request, b"content-length") or 0)
        if size > limits.max_body_bytes:
            raise Refusal(413, f"a body of {size} bytes; at most {limits.max_body_bytes} are taken")
        if server._known >= limits.max_known:
            raise Refusal(503, f"{limits.max_known} requests are being answered; come back later")
        if server._buffered + size > limits.max_buffered_bytes:
            raise Refusal(503, "too many large requests at once; come back later")
        server._known += 1
        server._buffered += size
        try:
            yield size
        finally:
            server._known -= 1
            server._buffered -= size

    async def _head(self) -> h11.Request:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                raise EOFError("closed before a request")
            self._http.receive_data(await self._reader.read(2**14))

    async def _body(self, size: int) -> bytes:
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(2**16))
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert len(body) == size
                return bytes(body)
            else:
                raise EOFError("closed within a body")

    async def _refuse(self, caller: C | None, refusal: Refusal) -> None:
        answer = self._service.refuse(caller, refusal)
        await self._send(answer, {} if caller is None else self._service.sign(caller, answer))
        # Closing while unread bytes lie there would reset the connection, and the caller might never see the answer.
        with contextlib.suppress(asyncio.TimeoutError):
            most = self._limits.max_head_bytes if caller is None else 2 * self._limits.max_body_bytes
            await asyncio.wait_for(self._discard(most), 1.0)

    async def _discard(self, most: int) -> None:
        while most > 0 and (data := await self._reader.read(2**14)):
            most -= len(data)

    async def _send(self, answer: Answer, headers: dict[str, str]) -> None:
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(answer.body)),
            "Connection": "close",
            **headers,
        }
        http = self._http
        if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        response = h11.Response(status_code=answer.status, headers=list(fields.items()))
        for event in (response, h11.Data(data=answer.body), h11.EndOfMessage()):
            self._writer.write(http.send(event) or b"")
        await asyncio.wait_for(self._writer.drain(), self._limits.send_timeout_s)
        if self._writer.can_write_eof():
            self._writer.write_eof()


def _only(request: h11.Request, name: bytes) -> str | None:
    """The value of a header that must not be there twice."""
    values = [value for field, value in request.headers if field == name]
    if len(values) > 1:
        raise Refusal(400, f"two headers {name.decode()}")
    return values[0].decode("latin-1") if values else None
