"""Connections of clients that are slow, silent, or too many: bounds that uvicorn's own protocol does not set."""

from __future__ import annotations

import asyncio
import socket
import struct

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""How long a client may take to send the head of a request, the first one's connection included."""

WRITE_S = 30.0
"""How long a client may read nothing of an answer that waits for it."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 in which a client cannot hold a connection without asking for something and taking its answer.

    uvicorn closes a connection that is silent after an answer, and nothing else: one that never sends the whole head of a
    request, or never reads, is there as long as its client likes. What is read slowly, but steadily, is sent to its end. The body
    of a request has a time limit of its own (:mod:`megascend.serve.reading`).
    """

    _of_head: asyncio.TimerHandle | None = None
    _of_writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            self._drop()
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._of_head, self._of_writing):
            if timer is not None:
                timer.cancel()
        self._of_head = self._of_writing = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        """Between requests, be it that their head has begun or that a refused body is still coming, there is a time limit."""
        waits = self.cycle is None or self.cycle.response_complete
        if not waits and self._of_head is not None:
            self._of_head.cancel()
            self._of_head = None
        elif waits and self._of_head is None and self.timeout_keep_alive_task is None:
            self._of_head = self.loop.call_later(HEAD_S, self._drop)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # of a request that was answered early
            self._unset_keepalive_if_required()
            self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._of_head is None:  # closing waits for what is not read yet
            self._of_head = self.loop.call_later(WRITE_S, self._drop)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._of_writing is not None:
            self._of_writing.cancel()
            self._of_writing = None

    def _watch_writing(self, before: int | None) -> None:
        """End the connection if nothing was read since ``before`` so many bytes waited."""
        waiting = self.transport.get_write_buffer_size()
        if before is not None and waiting >= before:
            self._drop()
        else:
            self._of_writing = self.loop.call_later(WRITE_S, self._watch_writing, waiting)

    def _drop(self) -> None:
        """End the connection with what was not sent, which otherwise the kernel would keep for a client that does not read."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
