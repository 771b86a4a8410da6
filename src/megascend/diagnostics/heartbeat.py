"""The thread that tells the other ranks what this one does, and looks after them when it matters."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # not the built-in before Python 3.11
from typing import TYPE_CHECKING, TypeVar

from megascend.diagnostics.diagnosis import SILENT_S, PeerStatus, Record
from megascend.diagnostics.processes import Process

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

BEAT_S = 1.0
"""Seconds between two records of a rank that does not move on."""
TICK_S = 0.2
"""Seconds between two looks at what this rank does; a change is published then."""
LOOK_S = 0.25
"""Seconds between two looks at the peers while somebody waits for a diagnosis."""


class Observer:
    """When each peer's beat was last seen to advance, by this process's own clock.

    Times are those of ``time.monotonic()``, passed in by the caller.
    """

    def __init__(self, reader: Process) -> None:
        self._reader = reader
        self._seen: dict[int, tuple[Record, float]] = {}  # and since when it is like that
        self._advanced: dict[int, float] = {}  # when a beat was last seen to come
        self._looked = self._clock = -1e9

    def update(self, records: Mapping[int, Record | None], now: float, clock: float, patience: float) -> None:
        """Take note of what the peers say ``now`` (``clock``: the same in ``time.time()``).

        Args:
            patience: this reader should have looked within so many seconds. If it did not, it may have been stopped itself,
                and the peers with it: silence is then counted from now on only.
        """
        resumed = now - self._looked > patience
        for rank, record in records.items():
            if record is None:
                continue
            last = self._seen.get(rank)
            advanced = last is not None and last[0].beat != record.beat
            if advanced:
                self._advanced[rank] = now
            if last is None or advanced or resumed:
                self._seen[rank] = record, now
        self._looked, self._clock = now, clock

    def statuses(self, peers: Iterable[int]) -> dict[int, PeerStatus | None]:
        """What is known of ``peers`` as of the last look."""
        found: dict[int, PeerStatus | None] = {}
        for rank in peers:
            if rank in self._seen:
                record, since = self._seen[rank]
                state = record.process.state_seen_by(self._reader)
                found[rank] = PeerStatus(record, self._looked - since, max(0.0, self._clock - record.clock), state)
            else:
                found[rank] = None
        return found

    def undecided(self, since: float) -> bool:
        """Whether to look on: a peer may be alive or gone, having neither beaten after ``since`` nor been silent for long."""
        return any(
            self._advanced.get(rank, -1e9) <= since
            and self._looked - at < SILENT_S
            and record.failure is None
            and not record.ended
            for rank, (record, at) in self._seen.items()
        )


class Heartbeat:
    """Publishes this rank's record and reads the peers', on a thread and a connection of its own.

    The main thread never touches the connection: a store whose machine is gone may never answer.

    Args:
        store: a connection that nobody else uses.
        snapshot: this rank's record of the moment, given its beat.
        changed: a value that differs when the rank has moved on to something else.
        attend: called at every tick; for deadlines.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        snapshot: Callable[[int], Record],
        changed: Callable[[], object],
        attend: Callable[[Heartbeat], None],
    ) -> None:
        self._store, self._rank = store, rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._snapshot, self._changed, self._attend = snapshot, changed, attend
        self._tick = TICK_S * max(1.0, world_size / 512)
        self.look_s = max(BEAT_S, world_size / 64)
        self._observer = Observer(snapshot(0).process)
        self._beat, self._published, self._last_change, self._looked = 0, -1e9, object(), -1e9
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self.io = threading.Lock()  # held while the store is in use; who stops this process for a test takes it first
        self.lost: str | None = None
        self._thread = threading.Thread(target=self._run, name="megascend-monitor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the store still answers."""
        return self._thread.is_alive()

    # --- from other threads ---

    def flush(self, limit_s: float) -> None:
        """Publish this rank's record at once; returns when it is out, or after ``limit_s``."""
        self._ask(self._publish, limit_s)

    def look_around(self, limit_s: float) -> dict[int, PeerStatus | None] | None:
        """The peers, watched until each has shown that it is alive or has been silent for :data:`SILENT_S`.

        Returns:
            None if the store does not answer within ``limit_s``.
        """
        return self._ask(self._observe, limit_s)

    def close(self, limit_s: float = 2.0) -> None:
        """Publish a last record and end the thread."""
        self._tasks.put(None)
        self._thread.join(limit_s)

    def _ask(self, task: Callable[[], T], limit_s: float) -> T | None:
        answer: Future[object] = Future()
        self._tasks.put((task, answer))
        until = time.monotonic() + limit_s
        while self._thread.is_alive() and (left := until - time.monotonic()) > 0:
            try:
                return answer.result(min(left, TICK_S))  # type: ignore[return-value]
            except NotYet:
                continue  # also tells, every tick, whether the thread is still there
            except RuntimeError:
                return None  # the store is gone; self.lost says why
        return None

    # --- on the thread ---

    def _run(self) -> None:
        try:
            self._publish()
            while self._next():
                now = time.monotonic()
                if self._changed() != self._last_change or now - self._published >= BEAT_S:
                    self._publish()
                self._attend(self)
        except RuntimeError as error:  # the store's server has gone: at the end of a run, or with its machine
            self.lost = str(error)

    def _next(self) -> bool:
        """Do what another thread asks for, or wait a tick. False: end."""
        try:
            item = self._tasks.get(timeout=self._tick)
        except queue.Empty:
            return True
        if item is None:
            self._publish()
            return False
        task, answer = item
        try:
            result = task()
        except RuntimeError as error:
            answer.set_exception(error)
            raise
        answer.set_result(result)
        return True

    def _publish(self) -> None:
        self._last_change = self._changed()
        self._beat += 1
        with self.io:
            self._store.set(_key(self._rank), self._snapshot(self._beat).encode())
        self._published = time.monotonic()

    def poll(self) -> dict[int, PeerStatus | None]:
        """The peers as far as is known; looks at them anew at most every ``look_s`` seconds. For ``attend``."""
        if time.monotonic() - self._looked >= self.look_s:
            self._look()
        return self._observer.statuses(self._peers)

    def _look(self) -> None:
        records = self._read()
        self._looked = time.monotonic()
        self._observer.update(records, self._looked, time.time(), patience=3 * self.look_s + SILENT_S)

    def _read(self) -> dict[int, Record | None]:
        keys = {peer: _key(peer) for peer in self._peers}
        with self.io:
            if not self._store.check(list(keys.values())):
                keys = {peer: key for peer, key in keys.items() if self._store.check([key])}
            values = self._store.multi_get(list(keys.values())) if keys else []
        found: dict[int, Record | None] = dict.fromkeys(self._peers)
        found.update((peer, Record.decode(value)) for peer, value in zip(keys, values, strict=True))
        return found

    def _observe(self) -> dict[int, PeerStatus | None]:
        start = time.monotonic()
        self._publish()
        while True:
            self._look()
            found = self._observer.statuses(self._peers)
            certain = any(seen is not None and seen.conclusive for seen in found.values())
            if certain or not self._observer.undecided(start) or self._looked - start > SILENT_S + 2 * BEAT_S:
                return found
            time.sleep(max(LOOK_S, self.look_s / 8))
            if time.monotonic() - self._published >= BEAT_S:
                self._publish()


def _key(rank: int) -> str:
    return f"monitor/{rank}"
