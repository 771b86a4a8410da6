"""One HTTP/1.1 request and its answer, bounded."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import h11

MAX_HEAD_BYTES = 16 * 2**10


@dataclass(frozen=True)
class Answer:
    """Status and body of an HTTP response."""

    status: int
    body: bytes


async def exchange(
    host: str,
    port: int,
    target: str,
    headers: dict[str, str],
    body: bytes,
    *,
    max_answer_bytes: int,
    method: str = "POST",
) -> tuple[Answer, dict[str, str]]:
    """Send a body; returns the answer and its headers, whose names are in lower case.

    It takes as long as the peer does; callers set a deadline.

    Raises:
        OSError: no connection, or it broke.
        EOFError: it was closed before the answer had arrived.
        h11.RemoteProtocolError: the answer is not HTTP, or larger than ``max_answer_bytes``.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=2**16)
    try:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        fields = {"Host": f"{host}:{port}", "Connection": "close", "Content-Length": str(len(body)), **headers}
        request = h11.Request(method=method, target=target, headers=list(fields.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        with contextlib.suppress(ConnectionError):  # refused before it was read: the answer may be there
            await writer.drain()
        return await _answer(reader, http, max_answer_bytes)
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, http: h11.Connection, most: int) -> tuple[Answer, dict[str, str]]:
    response, body = None, bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(2**16)
            if not data and response is None:
                raise EOFError("closed before an answer")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > most:
                raise h11.RemoteProtocolError(f"an answer of more than {most} bytes")
        elif isinstance(event, h11.EndOfMessage) and response is not None:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            return Answer(response.status_code, bytes(body)), headers
        elif not isinstance(event, h11.InformationalResponse):
            raise EOFError("closed within an answer")
