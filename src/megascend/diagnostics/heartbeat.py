"""The thread that publishes this rank's record and polls the peers' records."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # not the built-in before Python 3.11
from typing import TYPE_CHECKING, TypeVar

from megascend.diagnostics.diagnosis import SILENT_S, PeerStatus, RankRecord
from weightwire import liveness

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

HEARTBEAT_S = 1.0
"""Seconds between two records of a rank that makes no progress."""
TICK_S = 0.2
"""Seconds between two checks for progress of this rank; a change is published at once."""
POLL_S = 0.25
"""Seconds between two polls of the peers while a caller waits for a diagnosis."""


class Observer(liveness.HeartbeatObserver[RankRecord]):
    """Last heartbeats of the ranks, and their statuses as of the last poll."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = float("-inf")

    def poll(self, records: Mapping[int, RankRecord | None], now: float, clock: float, timeout_s: float) -> None:
        """Update the records as of ``now``, which is ``clock`` in ``time.time()``."""
        self.update(records, now, timeout_s)
        self._clock = clock

    def statuses(self, peers: Iterable[int]) -> dict[int, PeerStatus | None]:
        """Return the statuses of ``peers`` as of the last poll."""
        statuses: dict[int, PeerStatus | None] = dict.fromkeys(peers)
        for rank in statuses.keys() & self.records.keys():
            record = self.records[rank]
            state = record.process.state() if record.process is not None else None
            statuses[rank] = PeerStatus(record, self.silent_s(rank), max(0.0, self._clock - record.clock), state)
        return statuses

    def undecided(self, since: float) -> bool:
        """Check whether to poll on: some peer sent no heartbeat after ``since``, but is not silent long enough to be gone."""
        return any(
            not self.has_advanced(rank, since)
            and self.silent_s(rank) < SILENT_S
            and record.failure is None
            and not record.ended
            for rank, record in self.records.items()
        )


class HeartbeatThread:
    """Publisher of this rank's record and reader of the peers' records, with a dedicated thread and connection.

    The main thread never uses the connection: a store whose host is gone may never answer.

    Args:
        store: a connection that no other code uses.
        snapshot: returns this rank's current record for a heartbeat number.
        changed: returns a value that differs when the rank has made progress.
        attend: called at every tick, to check deadlines.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        snapshot: Callable[[int], RankRecord],
        changed: Callable[[], object],
        attend: Callable[[HeartbeatThread], None],
    ) -> None:
        self._store, self._rank = store, rank
        self.store_address = _address(store)
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._snapshot, self._changed, self._attend = snapshot, changed, attend
        # Ticks and polls grow with the world, since each poll reads all ranks' records from one server.
        self._tick = TICK_S * max(1.0, world_size / 512)
        self.poll_s = max(HEARTBEAT_S, world_size / 64)
        self._observer = Observer()
        self._count, self._published, self._last_change, self._polled = 0, -1e9, object(), -1e9
        # Requests of other threads, with a future for the answer; None ends the thread.
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        # Held while the store is in use. Fault injection takes it before it stops this process: a process stopped in the
        # middle of a request would block the store for all ranks.
        self.io = threading.Lock()
        self.lost: str | None = None
        # A daemon: interpreter exit would otherwise wait for ever if the store does not answer.
        self._thread = threading.Thread(target=self._run, name="megascend-monitor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Check whether the store still answers."""
        return self._thread.is_alive()

    # --- from other threads ---

    def flush(self, limit_s: float) -> None:
        """Publish this rank's record at once; return when it is stored, or after ``limit_s``."""
        self._ask(self._publish, limit_s)

    def poll_until_certain(self, limit_s: float) -> dict[int, PeerStatus | None] | None:
        """Poll the peers until each has sent a heartbeat or has been silent for :data:`SILENT_S`; return their statuses.

        Every status describes the time of the call or later. None if the store does not answer within ``limit_s``.
        """
        return self._ask(self._observe, limit_s)

    def read(self, peers: Sequence[int], limit_s: float) -> dict[int, RankRecord | None] | None:
        """Return the current records of ``peers``; None if the store does not answer within ``limit_s``."""
        return self._ask(lambda: self._read(peers), limit_s)

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
                continue  # waiting in ticks notices a thread that has ended
            except RuntimeError:
                return None  # the store is gone; self.lost holds the reason
        return None

    # --- on the thread ---

    def _run(self) -> None:
        try:
            self._publish()
            while self._next():
                now = time.monotonic()
                if self._changed() != self._last_change or now - self._published >= HEARTBEAT_S:
                    self._publish()
                self._attend(self)
        except RuntimeError as error:  # the store's server is gone: at the end of a run, or with its host
            self.lost = str(error)

    def _next(self) -> bool:
        """Run a task of another thread, or wait a tick; return False to end the thread."""
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
        # Before the snapshot: a change in between is published twice rather than not at all.
        self._last_change = self._changed()
        self._count += 1
        with self.io:
            self._store.set(_key(self._rank), self._snapshot(self._count).encode())
        self._published = time.monotonic()

    def poll(self) -> dict[int, PeerStatus | None]:
        """Return the peers' statuses; read their records at most every ``poll_s`` seconds. For ``attend``."""
        if time.monotonic() - self._polled >= self.poll_s:
            self._poll()
        return self._observer.statuses(self._peers)

    def _poll(self) -> None:
        records = self._read(self._peers)
        self._polled = time.monotonic()
        self._observer.poll(records, self._polled, time.time(), timeout_s=3 * self.poll_s + SILENT_S)

    def _read(self, peers: Sequence[int]) -> dict[int, RankRecord | None]:
        with self.io:
            values = liveness.read_records(self._store, [_key(peer) for peer in peers])
        return {
            peer: None if value is None else RankRecord.decode(value) for peer, value in zip(peers, values, strict=True)
        }

    def _observe(self) -> dict[int, PeerStatus | None]:
        start = time.monotonic()
        self._publish()
        while True:
            self._poll()
            statuses = self._observer.statuses(self._peers)
            conclusive = any(status is not None and status.conclusive for status in statuses.values())
            # A rank publishes its progress within a tick, so records read two ticks later are up to date.
            certain = conclusive and self._polled - start > 2 * self._tick
            if certain or not self._observer.undecided(start) or self._polled - start > SILENT_S + 2 * HEARTBEAT_S:
                return statuses
            time.sleep(max(POLL_S, self.poll_s / 8))
            if time.monotonic() - self._published >= HEARTBEAT_S:
                self._publish()


def _key(rank: int) -> str:
    return f"monitor/{rank}"


def _address(store: Store) -> str:
    """Return the address of a TCP store, for messages; empty for other stores."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return f" at {host}:{port}" if host and port else ""
