"""The thread that publishes this rank's record and polls the peers' records."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in before Python 3.11
from typing import TYPE_CHECKING, TypeVar

from megascend.diagnostics.diagnosis import PeerStatus, RankRecord
from megascend.diagnostics.survey import TICK_S, Observer, Pace, Survey
from weightwire import liveness

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

SURVEY_ABOVE = 64
"""Ranks above which one rank reads the records for all (:mod:`megascend.diagnostics.survey`)."""


class HeartbeatThread:
    """Publisher of this rank's record and reader of the peers' records, with a dedicated thread and connection.

    The main thread never uses the connection: a store whose host is gone may never answer.

    Args:
        store: a connection that no other code uses.
        snapshot: returns this rank's current record for a heartbeat number.
        changed: returns a value that differs when the rank has made progress.
        on_tick: called at every tick, to check deadlines.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        snapshot: Callable[[int], RankRecord],
        changed: Callable[[], object],
        on_tick: Callable[[HeartbeatThread], None],
    ) -> None:
        self._store, self._rank = store, rank
        self.store_address = _address(store)
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._snapshot, self._changed, self._on_tick = snapshot, changed, on_tick
        self.pace = Pace(world_size)
        self._observer = Observer(self.pace)
        keys = [_key(number) for number in range(world_size)]
        self._survey = Survey(store, rank, keys, self.pace) if world_size > SURVEY_ABOVE else None
        self._count, self._published, self._last_change, self._polled = 0, -1e9, object(), -1e9
        # Requests of other threads, with a future for the answer; None ends the thread.
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        # Held while the store is in use. Fault injection takes it before it stops this process: a process stopped in the
        # middle of a request would block the store for all ranks.
        self.store_lock = threading.Lock()
        # A daemon: otherwise the interpreter could not exit if the store does not answer.
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

    def poll_until_certain(self) -> dict[int, PeerStatus | None] | None:
        """Poll the peers until each has sent a heartbeat or counts as gone; return their statuses.

        Every status describes the time of the call or later. None if there is no answer within ``pace.answer_s``.
        """
        return self._ask(self._observe, self.pace.answer_s)

    def read(self, peers: Sequence[int]) -> dict[int, RankRecord | None] | None:
        """Return the current records of ``peers``; for many peers, those of the last survey.

        None if the store does not answer within ``pace.answer_s``.
        """
        if self._survey is None or len(peers) <= SURVEY_ABOVE:
            return self._ask(lambda: self._read(peers), self.pace.answer_s)
        statuses = self._ask(self.poll, self.pace.answer_s)
        if statuses is None:
            return None
        return {peer: None if (status := statuses.get(peer)) is None else status.record for peer in peers}

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
            except FutureTimeoutError:
                continue  # waits in ticks, to notice a thread that has ended
            except RuntimeError:
                return None  # the store's server is gone
        return None

    # --- on the thread ---

    def _run(self) -> None:
        try:
            self._publish()
            while self._next():
                now = time.monotonic()
                if self._changed() != self._last_change or now - self._published >= self.pace.heartbeat_s:
                    self._publish()
                if self._survey is not None:
                    with self.store_lock:
                        self._survey.step()
                self._on_tick(self)
        except RuntimeError:  # the store's server is gone: at the end of a run, or with its host
            return

    def _next(self) -> bool:
        """Run a task of another thread, or wait a tick; return False to end the thread."""
        try:
            item = self._tasks.get(timeout=self.pace.tick_s)
        except queue.Empty:
            return True
        if item is None:
            self._publish()
            if self._survey is not None:
                with self.store_lock:
                    self._survey.close()
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
        with self.store_lock:
            self._store.set(_key(self._rank), self._snapshot(self._count).encode())
        self._published = time.monotonic()

    def poll(self) -> dict[int, PeerStatus | None]:
        """Return the peers' statuses; read their records at most every ``pace.poll_s`` seconds. For ``on_tick``.

        In a large world these are the statuses of the last survey, none at first, and a new survey is requested.
        """
        due = time.monotonic() - self._polled >= self.pace.poll_s
        if self._survey is None:
            if due:
                self._poll()
            return self._observer.statuses(self._peers)
        if due and not self._survey.pending:
            self._polled = time.monotonic()
            with self.store_lock:
                self._survey.request()
        return self._surveyed_peers(self._survey)

    def _surveyed_peers(self, survey: Survey) -> dict[int, PeerStatus | None]:
        return {peer: status for peer, status in survey.statuses.items() if peer != self._rank}

    def _poll(self) -> None:
        records = self._read(self._peers)
        self._polled = time.monotonic()
        self._observer.poll(records, self._polled, time.time(), 3 * self.pace.poll_s + self.pace.silent_s)

    def _read(self, peers: Sequence[int]) -> dict[int, RankRecord | None]:
        with self.store_lock:
            values = liveness.read_records(self._store, [_key(peer) for peer in peers])
        return {
            peer: None if value is None else RankRecord.decode(value) for peer, value in zip(peers, values, strict=True)
        }

    def _observe(self) -> dict[int, PeerStatus | None] | None:
        start = time.monotonic()
        self._publish()
        if self._survey is not None:
            with self.store_lock:
                self._survey.request()
        while True:
            if self._survey is None:
                self._poll()
                statuses = self._observer.statuses(self._peers)
                if self._observer.certain(statuses, start):
                    return statuses
            else:
                with self.store_lock:
                    self._survey.step()
                if not self._survey.pending:
                    return self._surveyed_peers(self._survey)
                if time.monotonic() - start > self.pace.answer_s:  # the caller no longer waits
                    return None
            time.sleep(min(self.pace.urgent_poll_s, TICK_S) if self._survey is not None else self.pace.urgent_poll_s)
            if time.monotonic() - self._published >= self.pace.heartbeat_s:
                self._publish()


def _key(rank: int) -> str:
    return f"monitor/{rank}"


def _address(store: Store) -> str:
    """Return the address of a TCP store, for messages; empty for other stores."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return f" at {host}:{port}" if host and port else ""
