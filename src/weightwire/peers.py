"""The members of a group as one of them sees the others: failure detector over heartbeats, reports and processes.

Three sources of evidence, in the order in which they can be trusted:

- a member's process on this machine has ended or is stopped: known at once;
- a member reported its own failure: in the store, once a group;
- a member's heartbeat is overdue by :data:`SILENCE_S`: all that there is to see of another machine.

Processes and heartbeats are those of :mod:`weightwire.liveness`, as in the diagnosis of a trainer's collectives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from weightwire.background import BackgroundThread, Guard
from weightwire.errors import DeadlineError, GroupError, PeerLostError, TransportError
from weightwire.liveness import HeartbeatObserver, Identity, read_records

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Interval of a member's heartbeats, in seconds."""
HALTED_STATES = ("stopped", "ended")
"""States of a process that does nothing."""
SILENCE_S = 30.0
"""A member without a heartbeat for this long counts as gone, in seconds."""
STORE_S = 5.0
"""Deadline of one request to the store, in seconds."""
PROBE_S = 1.0
"""Deadline of a connection that only tests whether the listener's port is open, in seconds."""


def poll_pause(waited_s: float) -> float:
    """Return the seconds until the store is asked again: a twentieth of the wait so far, so that it is hardly prolonged."""
    return min(max(waited_s / 20, 0.0005), 0.05)


@dataclass(frozen=True)
class Heartbeat:
    """Periodic record of a member: its number, the buckets done, and whether the member has left the group."""

    heartbeat: int = 0
    progress: int = 0
    left: bool = False


class Records:
    """Records of one group in the store, all of them texts. No call waits for a record to appear.

    A lock serialises the calls: the watcher's thread uses the same connection as the caller's.

    Raises, in any method:
        RuntimeError: the store does not answer.
    """

    def __init__(self, store: Store, group: str) -> None:
        self._store, self._group = store, group
        # Two threads in one request would read each other's answers.
        self._lock = threading.Lock()

    def get(self, name: str) -> str | None:
        return self.get_all([name])[0]

    def get_all(self, names: Sequence[str]) -> list[str | None]:
        """Return records; None for those that do not exist yet."""
        with self._lock:
            values = read_records(self._store, [f"{self._group}/{name}" for name in names])
        return [None if value is None else value.decode() for value in values]

    def write(self, name: str, text: str) -> None:
        with self._lock:
            self._store.set(f"{self._group}/{name}", text)

    def write_once(self, name: str, text: str) -> None:
        with self._lock:
            self._store.compare_set(f"{self._group}/{name}", "", text)

    def count(self, name: str) -> int:
        """Increment a counter that all members share, and return it."""
        with self._lock:
            return self._store.add(f"{self._group}/{name}", 1)


class Peers:
    """The members of a group, and a thread that writes this one's heartbeat and looks after the others.

    The sender watches every receiver. Receivers watch the sender alone, which reports what it knows of the others: with every
    member watching every other, a store of n members would answer n * n requests per beat.

    Args:
        store: the listener's, in the sender's process.

    Attributes:
        name: name of the group.
        rank: rank of this member; rank 0 sends, in a sharded update other members too.
        members: names for messages, by rank.
        host, port: address of the listener.
        senders: number of members that send, the first ones; rank 0 coordinates.
        identities: processes of the members that have joined, by rank.
        lost: the first loss that was noticed, or None.
        at_fault: False if the member that reported a failure only waited for another one.
        ended: set when this member leaves.
    """

    def __init__(
        self, name: str, rank: int, members: Sequence[str], host: str, port: int, store: Store, senders: int = 1
    ) -> None:
        self.name, self.rank, self.members, self.senders = name, rank, tuple(members), senders
        self.host, self.port = host, port
        self.identities: dict[int, Identity] = {}
        self.lost: PeerLostError | None = None
        self.at_fault = True
        self.ended = threading.Event()
        self._watched_ranks = range(1, len(members)) if rank == 0 else range(1)
        self._store: Store | None = store
        self._records = Records(store, name)
        self._observer = HeartbeatObserver[Heartbeat]()
        self._beat, self._done, self._left, self._unanswered = 0, 0, False, 0.0
        self._watcher: BackgroundThread | None = None

    def progress(self, buckets: int) -> None:
        """Set the number of buckets that this member has finished; the next heartbeat reports it."""
        self._done = buckets

    def member(self, rank: int) -> str:
        """Return a member's name for messages, with its process if that is known."""
        sender = "the sender" if self.senders == 1 else f"sender {rank}"
        role = sender if rank < self.senders else f"receiver {rank - self.senders + 1}"
        process = f", {self.identities[rank]}" if rank in self.identities else ""
        return f"{role} ({self.members[rank]}{process})"

    # --- joining ---

    def join(self, deadline: float, abandoned: threading.Event | None = None) -> None:
        """Claim this member's rank, wait until all members have claimed theirs, and start to watch them.

        Args:
            deadline: end of the wait, in ``time.monotonic()``.
            abandoned: ends the wait early, with a PeerLostError, when set.
        """
        if self._records.get("ended") is not None:
            raise GroupError(f"group {self.name} has ended; names are used once")
        # A counter, not a flag: two members that claim a rank at the same time must not both find it free.
        if self._records.count(f"claims/{self.rank}") != 1:
            raise GroupError(
                f"the rank of {self.member(self.rank)} in group {self.name} is taken: it was assigned twice, or the group "
                "is used again"
            )
        # After the claim: of two members with one rank, the others must see the process of the one that has it.
        self._records.write(f"here/{self.rank}", json.dumps(Identity.current().to_json()))
        start = time.monotonic()
        while missing := self._missing():
            if (failure := self.failure()) is not None:
                # The same error as on the member whose deadline passed first, but for those that have joined since.
                late = [rank for rank in self._reported_missing() if rank in missing]
                raise self._timeout(late) if late else failure
            for rank, identity in self.identities.items():
                if rank != self.rank and identity.state() == "ended":
                    raise PeerLostError(f"{self.member(rank)} has ended before the group was complete")
            if abandoned is not None and abandoned.is_set():
                raise PeerLostError(f"{self.member(self.rank)} gave up before the group was complete")
            if time.monotonic() > deadline:
                self._records.write_once("missing", json.dumps(missing))
                raise self._timeout(missing)
            # Polled: torch logs a warning for each wait of a store that ends at its deadline.
            time.sleep(poll_pause(time.monotonic() - start))
        if self._reported_missing() and (failure := self.failure()) is not None:
            raise failure  # the last member joined too late: the others have given up
        self._watcher = BackgroundThread(self._watch, name=f"weightwire-{self.name}")
        self._watcher.start()

    def _missing(self) -> list[int]:
        """Return the ranks that have not joined; read the identities of those that have."""
        missing = [rank for rank in range(len(self.members)) if rank not in self.identities]
        texts = self._records.get_all([f"here/{rank}" for rank in missing])
        joined = {rank: text for rank, text in zip(missing, texts, strict=True) if text is not None}
        self.identities |= {rank: Identity(*fields(text, (str, str, int, int))) for rank, text in joined.items()}
        return [rank for rank in missing if rank not in joined]

    def _reported_missing(self) -> list[int]:
        """Return the ranks that were missing when the first deadline passed; empty if none has."""
        text = self._records.get("missing")
        ranks = [] if text is None else json.loads(text)
        return ranks if isinstance(ranks, list) else []

    def _timeout(self, ranks: list[int]) -> DeadlineError:
        names = ", ".join(map(self.member, ranks))
        return DeadlineError(
            f"{self.member(self.rank)}: timed out waiting for members to join group {self.name}: {names}"
        )

    def leave(self) -> bool:
        """Stop watching, and write a last heartbeat that says so: the end of this process then means nothing.

        When the sender leaves, the group ends. A second call does nothing.

        Returns:
            True if the store has answered, and nothing uses its connection any more.
        """
        if self.ended.is_set():
            return False
        # Before the watcher is stopped: one that outlasts the wait below must not undo the last heartbeat.
        self._left = True
        self.ended.set()
        if self._watcher is not None:
            self._watcher.join(STORE_S + BEAT_S)
        try:
            self._write_heartbeat()
            if self.rank == 0:
                self._records.write("ended", "1")
        except RuntimeError as error:
            log.debug("%s left, but the store does not answer: %s", self.member(self.rank), error)
            return False
        return self.lost is None and (self._watcher is None or not self._watcher.is_alive())

    # --- evidence ---

    def poll(self) -> None:
        """Set ``lost`` if a member has failed or gone. An ended process is seen at once, silence after :data:`SILENCE_S`."""
        if self.lost is not None:
            return
        # Processes first: the store is in the sender's process, and does not answer once that has ended.
        for rank, state in self.halted_members().items():
            # Only an end is final: a stopped process is lost below, once its heartbeats are overdue.
            if state == "ended":
                # Its last record may say that it has left; a store that does not answer cannot tell.
                with contextlib.suppress(RuntimeError):
                    self._read_heartbeats([rank])
                    if self.has_left(rank):
                        continue
                self.lost = PeerLostError(f"{self.member(rank)} is gone: it has ended{self._progress_note(rank)}")
                return
        try:
            self.lost = self.failure()
            self._read_heartbeats(self._watched_ranks)
            self._unanswered = 0.0
        except RuntimeError as error:
            self._note_silent_store(error)
            return
        for rank in self._watched_ranks:
            if self.lost is None and not self.has_left(rank) and self._observer.silent_s(rank) > SILENCE_S:
                state = self.identities[rank].state()
                symptom = f"is {state}" if state in HALTED_STATES else "sends no heartbeats"
                self.lost = PeerLostError(
                    f"{self.member(rank)} {symptom}, for {SILENCE_S:g} s{self._progress_note(rank)}"
                )

    def failure(self) -> PeerLostError | None:
        """Return the failure that another member has reported, if any."""
        text = self._records.get("failure")
        if text is None:
            return None
        rank, reason, at_fault = fields(text, (int, str, int))
        # Its own report is no news to this member, and the store is not authenticated: a rank may be any number.
        if rank == self.rank or not 0 <= rank < len(self.members):
            return None
        self.at_fault = bool(at_fault)
        return PeerLostError(f"{self.member(rank)} has failed: {reason}")

    def beats(self) -> dict[int, int]:
        """Return the counters of the watched members' last heartbeats."""
        records = self._observer.records
        return {rank: records[rank].heartbeat for rank in self._watched_ranks if rank in records}

    def progress_of(self, rank: int) -> int:
        """Return the number of buckets that a watched member had finished at its last heartbeat."""
        return self._observer.records.get(rank, Heartbeat()).progress

    def has_left(self, rank: int) -> bool:
        """Check whether a member has closed the group, so that the end of its process means nothing."""
        return self._observer.records.get(rank, Heartbeat()).left

    def halted_members(self) -> dict[int, str]:
        """Return the state of members on this machine whose processes are stopped, or ended without leaving."""
        # Processes of other machines have no state here, and are left out.
        peers = ((rank, identity) for rank, identity in self.identities.items() if rank != self.rank)
        states = {rank: identity.state() for rank, identity in peers if not self.has_left(rank)}
        return {rank: state for rank, state in states.items() if state in HALTED_STATES}

    def report(self) -> str:
        """Describe the progress of the watched members, and the age of their heartbeats."""
        parts, since_poll = [], time.monotonic() - self._observer.polled
        for rank in self._watched_ranks:
            last = self._observer.records.get(rank)
            if last is None:
                parts.append(f"{self.member(rank)} has sent no heartbeat")
            else:
                age = (
                    "has left" if last.left else f"last heard of {self._observer.silent_s(rank) + since_poll:.1f} s ago"
                )
                parts.append(f"{self.member(rank)} has done {last.progress} buckets, {age}")
        return "; ".join(parts)

    # --- the watcher's thread ---

    def _watch(self) -> None:
        guard = Guard(f"{self.member(self.rank)}: the watch over group {self.name}")
        # Until this member leaves: without its heartbeats it would seem lost itself.
        while self.lost is None and not self.ended.wait(BEAT_S):
            with guard:
                try:
                    self._write_heartbeat()
                    self.poll()
                except RuntimeError as error:  # the store's
                    log.debug("%s: %s", self.member(self.rank), error)
                    self._note_silent_store(error)

    def _write_heartbeat(self) -> None:
        self._beat += 1
        self._records.write(f"alive/{self.rank}", json.dumps([self._beat, self._done, int(self._left)]))

    def _read_heartbeats(self, ranks: Sequence[int]) -> None:
        texts = self._records.get_all([f"alive/{rank}" for rank in ranks])
        # A member that has written none is silent from the first poll on.
        parsed = [(0, 0, 0) if text is None else fields(text, (int, int, int)) for text in texts]
        beats = (Heartbeat(beat, progress, bool(left)) for beat, progress, left in parsed)
        self._observer.update(dict(zip(ranks, beats, strict=True)), time.monotonic(), SILENCE_S / 2)

    def _note_silent_store(self, error: RuntimeError) -> None:
        """Set ``lost`` if the sender, whose process holds the store, has ended or no longer listens."""
        now = time.monotonic()
        self._unanswered = self._unanswered or now
        sender = self.identities.get(0)
        state = None if sender is None else sender.state()
        # torch's error does not say whether the store was slow or is gone, so the port is asked instead.
        if self.rank != 0 and (state == "ended" or not self._listening() or now - self._unanswered > SILENCE_S):
            reason = "its process has ended" if state == "ended" else "its store does not answer"
            self.lost = PeerLostError(f"{self.member(0)} is gone: {reason} ({str(error)[:200]})")

    def _listening(self) -> bool:
        """Return False if the listener's machine refuses connections to its port."""
        try:
            socket.create_connection((self.host, self.port), timeout=PROBE_S).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:  # slow, or unreachable for the moment
            return True
        return True

    def _progress_note(self, rank: int) -> str:
        last = self._observer.records.get(rank)
        return "" if last is None or rank == 0 else f"; it had done {last.progress} buckets"


def fields(text: str, kinds: Sequence[type]) -> Any:
    """Parse a record: a JSON list of values of these types."""
    values = json.loads(text)
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise TransportError(f"the store holds {text!r:.80}, which is not a record of a member")
    return values
