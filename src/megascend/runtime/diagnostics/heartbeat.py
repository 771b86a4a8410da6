"""The thread that publishes this rank's record and polls the peers' records."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in before Python 3.11
from typing import TYPE_CHECKING, TypeVar

from megascend.runtime.diagnostics.diagnosis import PeerStatus, RankRecord
from megascend.runtime.diagnostics.survey import TICK_S, Observer, Pace, Survey
from weightwire import liveness
from weightwire.background import BackgroundThread, Guard

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

SURVEY_ABOVE = 64
"""Ranks above which one rank reads the records for all (:mod:`megascend.runtime.diagnostics.survey`)."""


class StoreLostError(RuntimeError):
    """The store of the records does not answer: its server is gone, or the network to it is down."""


class HeartbeatThread:
    """Publisher of this rank's record and reader of the peers' records, with a dedicated thread and connection.

    The main thread never uses the connection: a store whose host is gone may never answer. Without the store, and after an
    exception, which is logged, the thread keeps checking deadlines.

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
        self._lost = self._closing = self._ended = False
        # A daemon: otherwise the interpreter could not exit if the store does not answer.
        self._thread = BackgroundThread(self._run, name="megascend-monitor")
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Check whether the thread runs and the store still answers."""
        return self._thread.is_alive() and not self._lost

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
        self._closing = True
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
            except Exception:  # noqa: BLE001  the thread has logged it
                return None
        return None

    # --- on the thread ---

    def _run(self) -> None:
        # One for each part: a heartbeat must not be missing because a check has failed.
        publication, check, tasks = (
            Guard(f"rank {self._rank}: the hang monitor's {part}", passes=StoreLostError)
            for part in ("heartbeat", "check", "answer")
        )
        while not self._ended:
            # Already logged; without the store, deadlines are still checked.
            with contextlib.suppress(StoreLostError), publication:
                now = time.monotonic()
                if self._changed() != self._last_change or now - self._published >= self.pace.heartbeat_s:
                    self._publish()
                if self._survey is not None:
                    with self._store_in_use():
                        self._survey.step()
            with contextlib.suppress(StoreLostError), check:
                self._on_tick(self)
            with contextlib.suppress(StoreLostError), tasks:
                self._next()

    def _next(self) -> None:
        """Run a task of another thread, or wait a tick."""
        try:
            item = self._tasks.get(timeout=self.pace.tick_s)
        except queue.Empty:
            return
        if item is None:
            self._ended = True
            self._publish()
            if self._survey is not None:
                with self._store_in_use():
                    self._survey.close()
            return
        task, answer = item
        try:
            result = task()
        except BaseException as error:
            answer.set_exception(error)
            raise
        answer.set_result(result)

    @contextlib.contextmanager
    def _store_in_use(self) -> Iterator[None]:
        """Use the connection within the context; raise StoreLostError if the store does not answer, now or before."""
        if self._lost:
            raise StoreLostError
        try:
            with self.store_lock:
                yield
        except RuntimeError as error:  # torch's; at the end of a run the store's process may be the first to go
            self._lost = True
            if not self._closing:
                logger.warning(
                    "rank %d: the store of the ranks' records%s does not answer, so no heartbeats are sent: %s",
                    self._rank,
                    self.store_address,
                    str(error)[:300],
                )
            raise StoreLostError from error

    def _publish(self) -> None:
        # Before the snapshot: a change in between is published twice rather than not at all.
        self._last_change = self._changed()
        self._count += 1
        record = self._snapshot(self._count).encode()
        with self._store_in_use():
            self._store.set(_key(self._rank), record)
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
            with self._store_in_use():
                self._survey.request()
        return self._surveyed_peers(self._survey)

    def certain(self, since: float) -> bool:
        """Check whether the statuses of :meth:`poll` describe the time after ``since``, as far as waiting longer would tell."""
        # A survey has waited for that itself.
        return self._survey is not None or self._observer.certain(self._observer.statuses(self._peers), since)

    def _surveyed_peers(self, survey: Survey) -> dict[int, PeerStatus | None]:
        return {peer: status for peer, status in survey.statuses.items() if peer != self._rank}

    def _poll(self) -> None:
        records = self._read(self._peers)
        self._polled = time.monotonic()
        self._observer.poll(records, self._polled, time.time(), 3 * self.pace.poll_s + self.pace.silent_s)

    def _read(self, peers: Sequence[int]) -> dict[int, RankRecord | None]:
        with self._store_in_use():
            values = liveness.read_records(self._store, [_key(peer) for peer in peers])
        return {
            peer: None if value is None else RankRecord.decode(value) for peer, value in zip(peers, values, strict=True)
        }

    def _observe(self) -> dict[int, PeerStatus | None] | None:
        start = time.monotonic()
        self._publish()
        if self._survey is not None:
            with self._store_in_use():
                self._survey.request()
        while True:
            if self._survey is None:
                self._poll()
                statuses = self._observer.statuses(self._peers)
                if self._observer.certain(statuses, start):
                    return statuses
            else:
                with self._store_in_use():
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
