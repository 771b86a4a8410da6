"""Happens-before between streams, hccl groups and the host, for strict mode.

Every queue (a stream, or the stream of an hccl group) numbers its work. Its clock says up to which number of every other queue
it has waited. The host's clock counts for all queues, since the host launches all work. Two accesses of the same bytes, one of
which writes, race unless a clock orders them.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simnpu.dtypes import strict
from simnpu.visible import CURRENT

Queue = tuple[int, str]  # index of the device, name
Clock = dict[Queue, int]


@dataclass(slots=True, eq=False)
class Access:
    """What one operator does with bytes ``begin`` to ``end`` of a storage."""

    queue: Queue
    number: int
    operator: str
    writes: bool
    begin: int = 0
    end: int = 0
    results: list[Any] = field(default_factory=list)  # what the operator wrote: arguments of races.region
    finish: Callable[[], Any] | None = None  # of a collective, which may not have run yet


class Accesses(list[Access]):
    """Accesses of a storage that later ones may race with.

    Args:
        pool: queue that its memory was allocated for.
    """

    def __init__(self, pool: Queue) -> None:
        super().__init__()
        self.pool = pool
        self.recorded: set[Queue] = set()  # by record_stream


class Order:
    """The clocks of the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.counts: Clock = defaultdict(int)
        self.clocks: dict[Queue, Clock] = defaultdict(dict)
        self.host: Clock = defaultdict(int)
        self.freed: dict[Queue, list[Access]] = defaultdict(list)  # by pool: accesses of memory that went back to it
        self.host_has_waited: list[Callable[[], None]] = []

    def now(self, queue: Queue) -> Clock:
        """Return the clock of whoever waits for all work of a queue so far."""
        return {**self.clocks[queue], queue: self.counts[queue]}

    def wait(self, queue: Queue, clock: Clock) -> None:
        _advance(self.clocks[queue], clock)

    def host_waits(self, clock: Clock) -> None:
        with self.lock:
            _advance(self.host, clock)
            for call in self.host_has_waited:
                call()

    def host_waits_for_device(self, index: int) -> None:
        for queue in list(self.counts):
            if queue[0] == index:
                self.host_waits(self.now(queue))

    def wait_for_streams(self, index: int) -> None:
        """Let the current stream wait for the device's others, as autograd does between the nodes of a backward pass."""
        for queue in list(self.counts):
            if queue[0] == index and is_stream(queue):
                self.wait(current(index), self.now(queue))

    def precedes(self, access: Access, queue: Queue) -> bool:
        """Check whether an access has ended when work that is now launched on ``queue`` starts."""
        clock, other = self.clocks[queue], access.queue
        return other == queue or access.number <= max(self.host.get(other, 0), clock.get(other, 0))

    def enter(self, accesses: Accesses, access: Access) -> Access | None:
        """Add an access of a storage and return one that it races with. Those that it makes irrelevant are dropped."""
        racing, kept = None, []
        for other in accesses:
            overlaps = other.begin < access.end and access.begin < other.end
            if overlaps and (access.writes or other.writes) and not self.precedes(other, access.queue):
                racing = racing or other
            covered = access.begin <= other.begin and other.end <= access.end
            replaced = covered and (access.writes or (other.queue == access.queue and not other.writes))
            if not replaced and other.number > self.host.get(other.queue, 0):
                kept.append(other)
        accesses[:] = [*kept, access]
        return racing


def _advance(clock: Clock, other: Clock) -> None:
    for queue, number in other.items():
        if number > clock.get(queue, 0):
            clock[queue] = number


@functools.cache
def stream_queue(index: int, stream_id: int) -> Queue:
    return index, f"stream {stream_id}"


def queue_of(stream: Any) -> Queue:
    return current(CURRENT.index) if stream is None else stream_queue(stream.device_index, stream.stream_id)


def is_stream(queue: Queue) -> bool:
    return queue[1].startswith("stream ")


def current(index: int) -> Queue:
    """Return the queue of the stream that this thread uses on a device."""
    stream = CURRENT.streams.get(index)
    return stream_queue(index, 0 if stream is None else stream.stream_id)


ORDER = Order() if strict() else None
"""None unless SIMNPU_STRICT=1 is set when the device is made."""
