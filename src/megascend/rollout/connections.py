"""Connections of clients that are slow, silent, or too many: bounds that uvicorn's own protocol does not set."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""How long a client may take to send the head of a request, the first one's connection included."""

WRITE_S = 30.0
"""How long a client may read nothing of an answer that waits for it."""

OWNER = "megascend.tenant"
"""In a request's scope: the tenant whose key it has."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 in which a client cannot hold a connection without asking for something and taking its answer.

    uvicorn closes a connection that is silent after an answer, and nothing else: one that never sends the whole head of a
    request, or never reads, is there as long as its client likes. What is read slowly, but steadily, is sent to its end. The body
    of a request has a time limit of its own (:mod:`megascend.serve.reading`).

    Attributes:
        most: connections at a time. uvicorn's ``limit_concurrency`` would refuse requests whosever they are.
        since: when this one was made.
    """

    most: int | None = None
    since = 0.0
    _of_head: asyncio.TimerHandle | None = None
    _of_writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        if self.most is not None and len(self.connections) > self.most:
            others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
            which = makes_room([Held(each.owner, each.idle, each.since) for each in others])
            others[which]._drop()
            if others[which] is self:
                return
        self._watch_head()

    @property
    def owner(self) -> str:
        """Whose connection this is: the tenant's whose key its last request had, or else its address's."""
        tenant = self.scope.get(OWNER) if self.scope is not None else None
        return f"tenant {tenant}" if tenant else f"address {self.client[0] if self.client else ''}"

    @property
    def idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

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
        self.connections.discard(self)


def bounded(most: int) -> type[BoundedProtocol]:
    """The protocol of a server that has up to so many connections."""
    return type("Bounded", (BoundedProtocol,), {"most": most})


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
    """Which connection is closed where there are too many: one of the owner with the most, so that nobody can take them all.

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
