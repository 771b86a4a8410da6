"""Surveys of a large world: one rank, the collector, reads all ranks' records, and the other ranks read its summary.

When a collective of n ranks fails, all of them look for the culprit. If each read every record, one server would serve n^2
records. So a rank that needs them requests a survey, by incrementing a counter in the store. The first one becomes the collector,
by an atomic exchange: it reads all records until each rank has sent a heartbeat or counts as gone, and publishes a summary with
the number of the last request older than its records, up to which it answers. A collector that makes no progress, or leaves, is
replaced by the next rank with a request.

The summary groups ranks whose records lead to the same verdict, and has texts and times for the first
:data:`~megascend.runtime.diagnostics.diagnosis.MAX_LISTED` ranks of each group only: no message lists more.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from megascend.runtime.diagnostics.diagnosis import MAX_LISTED, SILENT_S, PeerStatus, RankRecord
from weightwire import liveness

if TYPE_CHECKING:
    from torch.distributed import Store

HEARTBEAT_S = 1.0
"""Seconds between two records of a rank that makes no progress."""
TICK_S = 0.2
"""Seconds between two checks of a rank for its own progress; a change is published at once."""
URGENT_POLL_S = 0.25
"""Seconds between two reads of the records, or of the collector's progress, while a caller waits for a diagnosis."""

_REQUESTS, _COLLECTOR, _PROGRESS, _SUMMARY = (
    f"survey/{name}" for name in ("requests", "collector", "progress", "summary")
)
_DIGITS = bytes.maketrans(b"\0\1", b"01")


class Pace:
    """Seconds between the requests of a rank, so that one server can serve all ranks of the world.

    Attributes:
        tick_s: between two checks for progress: at most 5,000 records a second in all.
        heartbeat_s: between two records of a rank without progress.
        silent_s: without a heartbeat, after which a rank counts as gone.
        urgent_poll_s: between two reads of the store while a caller waits.
        poll_s: between two reads of the records while no caller waits.
        answer_s: for which the explanation of an error waits for the ranks' records.
    """

    def __init__(self, world_size: int) -> None:
        self.tick_s = TICK_S * max(1.0, world_size / 1024)
        self.heartbeat_s = max(HEARTBEAT_S, self.tick_s)
        self.silent_s = SILENT_S * self.heartbeat_s / HEARTBEAT_S
        self.urgent_poll_s = max(URGENT_POLL_S, world_size / 4096)
        self.poll_s = max(HEARTBEAT_S, world_size / 1024)
        self.answer_s = 2.5 * self.silent_s


class Observer(liveness.HeartbeatObserver[RankRecord]):
    """Last heartbeats of the ranks, and their statuses as of the last poll."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace, self._clock = pace, float("-inf")

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
            age = max(0.0, self._clock - record.clock)
            statuses[rank] = PeerStatus(record, self.silent_s(rank), age, state, self._pace.silent_s)
        return statuses

    def certain(self, statuses: Mapping[int, PeerStatus | None], since: float) -> bool:
        """Check whether the last poll's ``statuses`` describe the time after ``since``, as far as waiting longer would tell."""
        pace, waited = self._pace, self.polled - since
        # A rank publishes its progress within a tick, so records read two ticks later are up to date.
        if waited > 2 * pace.tick_s and any(status is not None and status.conclusive for status in statuses.values()):
            return True
        return waited > pace.silent_s + 2 * pace.heartbeat_s or not self._undecided(since)

    def _undecided(self, since: float) -> bool:
        """Check whether some peer sent no heartbeat after ``since``, but is not silent long enough to be gone."""
        return any(
            not self.has_advanced(rank, since)
            and self.silent_s(rank) < self._pace.silent_s
            and record.failure is None
            and not record.ended
            for rank, record in self.records.items()
        )


@dataclass(frozen=True)
class Progress:
    """State of a survey, published by its collector.

    Attributes:
        turn: number of the collector, incremented by each one that takes over.
        reads: number of times it has read the records.
        covered: number of the last request that its newest summary answers.
        ended: it no longer collects.
    """

    turn: int
    reads: int = 0
    covered: int = 0
    ended: bool = False


class Survey:
    """A rank's part in surveys: its requests, its turns as the collector, and the newest summary that it has read.

    Only one thread uses it.
    """

    def __init__(self, store: Store, rank: int, keys: list[str], pace: Pace) -> None:
        self._store, self._rank, self._keys, self._pace = store, rank, keys, pace
        self._observer = Observer(pace)
        self._requested = self._covered = 0
        self._holder, self._progress = "", Progress(0)
        self._changed = self._stepped_at = float("-inf")  # times of the last progress seen, and of the last step
        self._collecting: Progress | None = None
        self._request_counts: list[
            tuple[float, int]
        ] = []  # of unanswered requests: time, and number of requests so far
        self.statuses: dict[int, PeerStatus | None] = {}

    @property
    def pending(self) -> bool:
        """Check whether this rank waits for an answer."""
        return self._requested > self._covered

    @property
    def active(self) -> bool:
        """Check whether :meth:`step` has work to do, for this rank's request or as the collector."""
        return self.pending or self._collecting is not None

    def request(self) -> None:
        """Request a summary of records that are younger than this call; call :meth:`step` while :attr:`pending`."""
        self._requested = self._store.add(_REQUESTS, 1)
        self._stepped_at = float("-inf")

    def step(self) -> None:
        """Collect, or check whether the collector has answered; at most every ``urgent_poll_s`` seconds."""
        now = time.monotonic()
        if not self.active or now - self._stepped_at < self._pace.urgent_poll_s:
            return
        self._stepped_at = now
        if self._collecting is None and not self._follow(now):
            self._try_to_collect(now)
        if self._collecting is not None:
            self._collect(self._collecting)

    def close(self) -> None:
        """Leave the collection to others."""
        if self._collecting is not None:
            self._write(replace(self._collecting, ended=True))
            self._collecting = None

    def _follow(self, now: float) -> bool:
        """Read the collector's progress, and its summary if it answers the request; return whether to keep waiting for it."""
        progress = self._read()
        if progress is None or progress.turn < self._progress.turn:
            return now - self._changed < self._pace.silent_s  # the next collector has not started
        if progress != self._progress:
            self._progress, self._changed = progress, now
        if progress.covered >= self._requested:
            self.statuses = decode(self._store.get(_SUMMARY), self._pace)
            self._covered = self._requested
            return True
        return not progress.ended and now - self._changed < self._pace.silent_s

    def _try_to_collect(self, now: float) -> None:
        """Become the collector, unless another rank has done so since the last read."""
        claim = f"{self._progress.turn + 1} {self._rank}"
        holder = self._store.compare_set(_COLLECTOR, self._holder, claim).decode()
        turn = int(holder.split()[0])
        # The previous collector, which this rank had not read yet: try again with its value.
        if turn <= self._progress.turn and holder != self._holder:
            holder = self._store.compare_set(_COLLECTOR, holder, claim).decode()
            turn = int(holder.split()[0])
        self._holder, self._changed = holder, now
        if holder == claim:
            self._collecting, self._request_counts = Progress(turn), []
        if turn > self._progress.turn:
            self._progress = Progress(turn)

    def _collect(self, progress: Progress) -> None:
        """Read all records, and publish a summary if it answers more requests than the last one."""
        current = self._read()
        if current is not None and current.turn > progress.turn:
            self._collecting = None  # this process was suspended, and another rank has taken over
            return
        now = time.monotonic()
        requests = self._store.add(_REQUESTS, 0)
        if not self._request_counts or self._request_counts[-1][1] < requests:
            self._request_counts.append((now, requests))
        values = liveness.read_records(self._store, self._keys)
        records = {rank: None if value is None else RankRecord.decode(value) for rank, value in enumerate(values)}
        self._observer.poll(records, time.monotonic(), time.time(), 3 * self._pace.poll_s + self._pace.silent_s)
        statuses = self._observer.statuses(records)
        covered = [count for since, count in self._request_counts if self._observer.certain(statuses, since)]
        if covered:
            self._request_counts = [entry for entry in self._request_counts if entry[1] > covered[-1]]
            self._store.set(_SUMMARY, encode(statuses))  # type: ignore[reportArgumentType]  torch's stub takes text only
        progress = replace(
            progress,
            reads=progress.reads + 1,
            covered=max([progress.covered, *covered]),
            ended=not self._request_counts,
        )
        self._write(progress)
        self._collecting = None if progress.ended else progress
        if progress.covered >= self._requested:
            self.statuses, self._covered = statuses, self._requested

    def _read(self) -> Progress | None:
        if not self._store.check([_PROGRESS]):
            return None
        return Progress(*json.loads(self._store.get(_PROGRESS)))

    def _write(self, progress: Progress) -> None:
        self._store.set(_PROGRESS, json.dumps([progress.turn, progress.reads, progress.covered, progress.ended]))


def encode(statuses: Mapping[int, PeerStatus | None]) -> bytes:
    """Return a summary of the statuses of all ranks."""
    ranks_by_set: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        ranks_by_set.setdefault(repr(_same_fields(status)), []).append(rank)
    sets = []
    for ranks in ranks_by_set.values():
        same = _same_fields(statuses[ranks[0]])
        fields = None if same is None else [asdict(same[0]), *same[1:]]
        entries = [] if same is None else [_entry(statuses[rank]) for rank in ranks[:MAX_LISTED]]
        # As bits: sets of ranks of a layout's axis compress well, and any others take n / 8 bytes.
        bits = bytearray(max(ranks) + 1)
        for rank in ranks:
            bits[rank] = 1
        sets.append([f"{int(bits[::-1].translate(_DIGITS), 2):x}", fields, entries])
    return zlib.compress(json.dumps(sets, separators=(",", ":")).encode())


def decode(summary: bytes, pace: Pace) -> dict[int, PeerStatus | None]:
    """Return the statuses of all ranks; beyond the first ones of a group, times and texts are those of another member."""
    statuses: dict[int, PeerStatus | None] = {}
    for bits, fields, entries in json.loads(zlib.decompress(summary)):
        members = int(bits, 16)
        ranks = [rank for rank in range(members.bit_length()) if members >> rank & 1]
        if fields is None:
            statuses |= dict.fromkeys(ranks)
            continue
        first = [_status(fields, entry, pace) for entry in entries]
        statuses |= zip(ranks, first, strict=False)
        # Without the process, whose host would be the other rank's.
        rest = replace(first[-1], record=replace(first[-1].record, process=None))
        statuses |= dict.fromkeys(ranks[len(first) :], rest)
    return dict(sorted(statuses.items()))


def _same_fields(status: PeerStatus | None) -> tuple[RankRecord, bool, str | None] | None:
    """Return the fields that decide the verdict of ``diagnosis.judge``; None without a record."""
    if status is None:
        return None
    record = status.record
    failure = None if record.failure is None else replace(record.failure, error="")
    # Only the presence of a Python frame matters, not its line.
    same = replace(
        record, heartbeat=0, seconds=0.0, clock=0.0, process=None, failure=failure, frame="line" if record.frame else ""
    )
    return same, status.silent >= status.limit, status.state


def _entry(status: PeerStatus | None) -> list[Any]:
    assert status is not None
    record = status.record
    error = "" if record.failure is None else record.failure.error
    process = None if record.process is None else record.process.to_json()
    return [record.heartbeat, record.seconds, record.clock, record.frame, error, process, status.silent, status.age]


def _status(fields: list[Any], entry: list[Any], pace: Pace) -> PeerStatus:
    same, _, state = fields
    heartbeat, seconds, clock, frame, error, process, silent, age = entry
    record = RankRecord.decode(json.dumps(same))
    failure = None if record.failure is None else replace(record.failure, error=error)
    identity = None if process is None else liveness.Identity(*process)
    record = replace(
        record, heartbeat=heartbeat, seconds=seconds, clock=clock, frame=frame, process=identity, failure=failure
    )
    # The process may be on this rank's host, which the collector cannot see.
    state_here = None if identity is None else identity.state()
    return PeerStatus(record, silent, age, state if state_here is None else state_here, pace.silent_s)
