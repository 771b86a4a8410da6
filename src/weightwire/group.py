"""The sender and the receivers of one update meet, and know of each other who is missing, failed, silent or gone.

A :class:`Listener` is a store of torch's on a port that the system chose. It announces groups; the address and the name of a
group reach its members by another way (an authenticated request to an engine). Nothing depends on who comes first, and a name
is used once. Every member tells the store that it is alive and how far it is, so that an error can say whose fault it is.

Whoever reaches the store can read and write it: it binds to one address, this machine's own unless told otherwise, and what
must not be forged (manifest, digests) does not go through it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from weightwire.errors import DeadlineError, GroupError, PeerLostError, TransportError, WireError
from weightwire.liveness import Identity

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""How often a member says that it is alive, in seconds."""
SILENCE_S = 30.0
"""A member that has not said so for this long counts as gone."""
EXPLAIN_S = 3.0
"""How long an error waits to learn whose fault it is."""
STORE_S = 5.0
"""Deadline of one question to the store."""
PROBE_S = 1.0
"""Deadline of a look whether anybody listens at its port."""
ATTEMPT_S = 6.0
"""Deadline of an attempt to connect to it. torch asks the name server for the name of every address, which may take 5 s."""
MOST_MEMBERS = 4096


class Listener:
    """Where groups meet, for as long as a trainer runs: keep it longer than any group.

    Args:
        host: address or name of an interface of this machine, to which the store binds and under which members reach it.

    Raises:
        TransportError: it cannot bind there.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind)
            listening.bind(where)
            listening.listen(1024)
        except OSError as error:
            raise TransportError(f"cannot listen on {host!r}: {error}") from error
        self.host, self.port = host, int(listening.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=STORE_S),
        )
        self._count = 0

    def new_group(self, members: Sequence[str]) -> str:
        """Announce a group that meets once; returns its name, which no other group has had or will have.

        Args:
            members: what messages call them: the sender first, then the receivers.
        """
        if self._store is None:
            raise GroupError("the listener is closed")
        if not 2 <= len(members) <= MOST_MEMBERS:
            raise GroupError(f"a group has a sender and 1 to {MOST_MEMBERS - 1} receivers, not {len(members)} members")
        self._count += 1
        name = f"update-{self._count}-{uuid.uuid4().hex}"
        self._store.set(f"{name}/members", json.dumps(list(members)))
        return name

    def close(self) -> None:
        """Stop listening. Groups that still meet here lose their store."""
        self._store = None


@dataclass(frozen=True)
class Member:
    """What another member's record says, and when it last changed (``time.monotonic()``)."""

    beat: int
    progress: int
    left: bool
    changed: float


class Records:
    """Texts of one group in the store, which one thread asks at a time. None of the calls waits for a record.

    Raises, in any method:
        RuntimeError: the store does not answer.
    """

    def __init__(self, store: Store, group: str) -> None:
        self._store, self._group = store, group
        self._lock = threading.Lock()

    def get(self, name: str) -> str | None:
        """Return a record; None if there is none yet."""
        key = f"{self._group}/{name}"
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def put(self, name: str, text: str) -> None:
        """Write a record."""
        with self._lock:
            self._store.set(f"{self._group}/{name}", text)

    def put_once(self, name: str, text: str) -> None:
        """Write a record unless it is there."""
        with self._lock:
            self._store.compare_set(f"{self._group}/{name}", "", text)

    def count(self, name: str) -> int:
        """Return how often this was called for ``name``, by all members."""
        with self._lock:
            return self._store.add(f"{self._group}/{name}", 1)


class Group:
    """One member's place in a group that has met. Made by :func:`join`.

    Attributes:
        name, rank, members: of the group: rank 0 sends; ``members`` are what messages call them.
        host, port: the listener's.
    """

    def __init__(self, name: str, rank: int, members: Sequence[str], host: str, port: int, store: Store) -> None:
        self.name, self.rank, self.members = name, rank, tuple(members)
        self.host, self.port = host, port
        self._records = Records(store, name)
        self._identities: dict[int, Identity] = {}
        self._seen: dict[int, Member] = {}
        self._lost: PeerLostError | None = None
        self._at_fault = True
        self._progress, self._beat, self._left = 0, 0, False
        self._unanswered = 0.0
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Number of members, the sender included."""
        return len(self.members)

    @property
    def identities(self) -> tuple[Identity, ...]:
        """The members' processes, by rank."""
        return tuple(self._identities[rank] for rank in range(self.size))

    def member(self, rank: int) -> str:
        """What messages call a member."""
        role = "the sender" if rank == 0 else f"receiver {rank}"
        where = f", {self._identities[rank]}" if rank in self._identities else ""
        return f"{role} ({self.members[rank]}{where})"

    def store(self, purpose: str, timeout_s: float) -> Store:
        """A store of this group's own, over a connection of its own, whose waits last ``timeout_s`` at most.

        Raises:
            TransportError: the listener does not answer.
        """
        return PrefixStore(f"{self.name}/{purpose}", connect(self.host, self.port, timeout_s))

    def progress(self, buckets: int) -> None:
        """Note that this member has finished so many buckets; others learn it with the next sign of life."""
        self._progress = buckets

    def progress_of(self, rank: int) -> int:
        """How many buckets another member had finished when it was last heard of."""
        seen = self._seen.get(rank)
        return 0 if seen is None else seen.progress

    def check(self) -> None:
        """Raise PeerLostError if a member is known to have failed or gone. Costs nothing."""
        if self._lost is not None:
            raise PeerLostError(str(self._lost))

    def abandon(self, reason: str) -> None:
        """Make :meth:`check` raise on this member: the wait that another thread is in ends within a moment."""
        self._lost = self._lost or PeerLostError(f"given up: {reason}")

    def acknowledge(self, what: str) -> None:
        """Tell the others that this member has done something that they wait for."""
        try:
            self._records.put(f"{what}/{self.rank}", "1")
        except RuntimeError as error:
            raise TransportError(f"the store does not answer: {error}") from error

    def await_receivers(self, what: str, timeout_s: float) -> None:
        """Wait until every receiver has acknowledged something.

        Raises:
            DeadlineError: not within ``timeout_s`` seconds; the message names those that have not.
            PeerLostError: a member is lost.
            TransportError: the store does not answer.
        """
        deadline, pause = time.monotonic() + timeout_s, 0.0005
        waiting = list(range(1, self.size))
        while True:
            try:
                waiting = [rank for rank in waiting if self._records.get(f"{what}/{rank}") is None]
            except RuntimeError as error:
                raise TransportError(f"the store does not answer: {error}") from error
            if not waiting:
                return
            self.check()
            if time.monotonic() > deadline:
                names = ", ".join(map(self.member, waiting))
                raise DeadlineError(f"{what!r} has not been told within {timeout_s:g} s by {names}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def fail(self, reason: str, *, at_fault: bool = True) -> None:
        """Tell all members that this one has failed. The first to say so is believed.

        Args:
            at_fault: it is this member's own fault. Without it the others look for whoever kept this one waiting.
        """
        text = json.dumps([self.rank, reason[:2000], int(at_fault)])
        try:
            self._records.put_once("failure", text)
        except RuntimeError as error:
            log.debug("%s could not tell that it has failed: %s", self.member(self.rank), error)

    def explain(self, error: WireError, what: str) -> WireError:
        """The error to raise for one that a transport raised: one that names the culprit, where there is one.

        Waits up to :data:`EXPLAIN_S` for a member to be seen gone.

        Args:
            what: this member's part in it: ``"sending bucket 3 of 12"``.
        """
        where = f"{self.member(self.rank)}, {what}"
        until = time.monotonic() + EXPLAIN_S
        before = {rank: self._seen[rank].beat for rank in self._others() if rank in self._seen}
        while time.monotonic() < until and not self._halted():
            self._look()
            if self._lost is not None and self._at_fault:
                return PeerLostError(f"{where}: {self._lost}")
            if before and all(
                self._seen[rank].beat > beat + 1 or self._seen[rank].left for rank, beat in before.items()
            ):
                break  # all of them are alive
            self._ended.wait(0.05)
        silent = {rank for rank, beat in before.items() if self._seen[rank].beat == beat and not self._seen[rank].left}
        halted = self._halted()
        state = self.describe()
        if halted or silent:
            words = {"ended": "is gone: its process has ended", "stopped": "is stopped"}
            told = [f"{self.member(rank)} {words[how]}" for rank, how in halted.items()]
            told += [f"{self.member(rank)} gives no sign of life" for rank in sorted(silent - halted.keys())]
            kind = DeadlineError if isinstance(error, DeadlineError) else PeerLostError
            return kind(f"{where}: {', '.join(told)} ({error}); {state}")
        if self._lost is not None:
            return PeerLostError(f"{where}: {self._lost}; {state}")
        return type(error)(f"{where}: {error}; {state}")

    def _halted(self) -> dict[int, str]:
        """Members of this machine whose processes have ended without having left, or are stopped."""
        found = {}
        for rank, identity in self._identities.items():
            seen = self._seen.get(rank)
            if rank != self.rank and not (seen is not None and seen.left) and (how := identity.state()) is not None:
                found[rank] = how
        return found

    def describe(self) -> str:
        """How far the other members are, and when each was last heard of."""
        told, now = [], time.monotonic()
        for rank in self._others():
            seen = self._seen.get(rank)
            if seen is None:
                told.append(f"{self.member(rank)} has said nothing")
            else:
                heard = "has left" if seen.left else f"last heard of {max(0.0, now - seen.changed):.1f} s ago"
                told.append(f"{self.member(rank)} has done {seen.progress} buckets, {heard}")
        return "; ".join(told)

    def close(self) -> None:
        """Leave. The sender's leaving ends the group: nobody can join it any more."""
        if self._ended.is_set():
            return
        self._left = True
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(STORE_S + BEAT_S)
        try:
            self._tell()
            if self.rank == 0:
                self._records.put("ended", "1")
        except RuntimeError as error:
            log.debug("%s left a store that does not answer: %s", self.member(self.rank), error)

    # --- meeting ---

    def meet(self, deadline: float, given_up: threading.Event | None = None) -> None:
        """Take the place, and wait until all others have taken theirs. Called by :func:`join`."""
        if self._records.get("ended") is not None:
            raise GroupError(f"group {self.name} has ended; names are used once")
        if self._records.count(f"claims/{self.rank}") != 1:
            raise GroupError(
                f"the place of {self.member(self.rank)} in group {self.name} is taken: it was given out twice, or the "
                "group is used again"
            )
        self._records.put(f"here/{self.rank}", json.dumps(Identity.mine().to_json()))
        pause = 0.002
        while missing := [rank for rank in range(self.size) if not self._arrived(rank)]:
            if (failure := self._failure()) is not None:
                told = [rank for rank in self._told_missing() if rank in missing]
                raise self._not_come(told) if told else failure
            for rank, identity in self._identities.items():
                if rank != self.rank and identity.state() == "ended":
                    raise PeerLostError(f"{self.member(rank)} has ended before the group had met")
            if given_up is not None and given_up.is_set():
                raise PeerLostError(f"{self.member(self.rank)} has given up before the group had met")
            if time.monotonic() > deadline:
                self._records.put_once("missing", json.dumps(missing))
                raise self._not_come(missing)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        if self._told_missing() and (failure := self._failure()) is not None:
            raise failure  # the last to come is too late: the others have given up
        self._watcher = threading.Thread(target=self._watch, name=f"weightwire-{self.name}", daemon=True)
        self._watcher.start()

    def _not_come(self, ranks: list[int]) -> DeadlineError:
        """The error that names them, the same for the member whose deadline passes first and for those it tells."""
        names = ", ".join(map(self.member, ranks))
        return DeadlineError(f"{self.member(self.rank)}: these have not come to group {self.name}: {names}")

    def _told_missing(self) -> list[int]:
        """Whom a member whose deadline has passed waited for in vain."""
        text = self._records.get("missing")
        found = [] if text is None else json.loads(text)
        return found if isinstance(found, list) else []

    def _arrived(self, rank: int) -> bool:
        if rank in self._identities:
            return True
        text = self._records.get(f"here/{rank}")
        if text is not None:
            self._identities[rank] = Identity(*_fields(text, (str, str, int, int)))
        return text is not None

    # --- watching ---

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._beat += 1
                self._tell()
                self._look()
            except RuntimeError as error:
                log.debug("%s: %s", self.member(self.rank), error)
                self._note_silent_store(error)
            if self._lost is not None:
                return

    def _tell(self) -> None:
        self._records.put(f"alive/{self.rank}", json.dumps([self._beat, self._progress, int(self._left)]))

    def _look(self) -> None:
        """Find out whether a member is lost."""
        if self._lost is not None:
            return
        for rank, identity in self._identities.items():
            seen = self._seen.get(rank)
            if rank != self.rank and not (seen is not None and seen.left) and identity.state() == "ended":
                if self._has_left(rank):
                    continue
                self._lost = PeerLostError(f"{self.member(rank)} is gone: it has ended{self._after(rank)}")
                return
        try:
            self._lost = self._failure()
            now = time.monotonic()
            for rank in self._others():
                self._note(rank, now)
            self._unanswered = 0.0
        except RuntimeError as error:
            self._note_silent_store(error)
            return
        for rank in self._others():
            seen = self._seen[rank]
            if self._lost is None and not seen.left and now - seen.changed > SILENCE_S:
                state = self._identities[rank].state()
                how = f"is {state}" if state else "gives no sign of life"
                self._lost = PeerLostError(f"{self.member(rank)} {how}, for {SILENCE_S:g} s{self._after(rank)}")

    def _has_left(self, rank: int) -> bool:
        """Whether a process that has ended had said good-bye."""
        try:
            self._note(rank, time.monotonic())
        except RuntimeError:
            return False
        return self._seen[rank].left

    def _note(self, rank: int, now: float) -> None:
        text = self._records.get(f"alive/{rank}")
        beat, progress, left = (0, 0, 0) if text is None else _fields(text, (int, int, int))
        seen = self._seen.get(rank)
        if seen is None or (seen.beat, seen.progress, seen.left) != (beat, progress, bool(left)):
            self._seen[rank] = Member(beat, progress, bool(left), now)

    def _note_silent_store(self, error: RuntimeError) -> None:
        """The store, which is in the sender's process, did not answer: the sender is lost if nobody listens there any more."""
        now = time.monotonic()
        self._unanswered = self._unanswered or now
        sender = self._identities.get(0)
        state = None if sender is None else sender.state()
        if self.rank != 0 and (state == "ended" or not self._listening() or now - self._unanswered > SILENCE_S):
            how = f"its process has {state}" if state else "its store does not answer"
            self._lost = PeerLostError(f"{self.member(0)} is gone: {how}{self._after(0)} ({str(error)[:200]})")

    def _listening(self) -> bool:
        """Return False if the listener's machine refuses connections to its port."""
        try:
            socket.create_connection((self.host, self.port), timeout=PROBE_S).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:  # slow, or not reachable now: it may be back
            return True
        return True

    def _after(self, rank: int) -> str:
        seen = self._seen.get(rank)
        return "" if seen is None or rank == 0 else f"; it had done {seen.progress} buckets"

    def _failure(self) -> PeerLostError | None:
        text = self._records.get("failure")
        if text is None:
            return None
        rank, reason, at_fault = _fields(text, (int, str, int))
        if rank == self.rank or not 0 <= rank < self.size:
            return None
        self._at_fault = bool(at_fault)
        return PeerLostError(f"{self.member(rank)} has failed: {reason}")

    # --- the store ---

    def _others(self) -> list[int]:
        """Whom this member listens to: the sender to all, receivers to the sender, who knows of the others."""
        return list(range(1, self.size)) if self.rank == 0 else [0]


def join(
    host: str, port: int, name: str, rank: int, timeout_s: float, given_up: threading.Event | None = None
) -> Group:
    """Come to a group, and return when all its members have.

    Args:
        host, port: the listener's.
        name: of the group, from :meth:`Listener.new_group`.
        rank: the place in it: 0 sends, the others receive.
        given_up: makes it return early, with a PeerLostError, when set.

    Raises:
        GroupError: there is no such group, it has ended, or the place is taken.
        DeadlineError: members did not come within ``timeout_s`` seconds; the message names them.
        PeerLostError: one came and was gone, or told that it has failed.
        TransportError: nobody listens at the address.
    """
    deadline = time.monotonic() + timeout_s
    store = connect(host, port, STORE_S)
    try:
        if not store.check([f"{name}/members"]):
            raise GroupError(f"there is no group {name!r:.120} at {host}:{port}")
        members = json.loads(store.get(f"{name}/members"))
    except RuntimeError as error:
        if isinstance(error, WireError):
            raise
        raise _unreachable(host, port, error) from error
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        raise GroupError(f"group {name!r:.120} has no list of members")
    if not 0 <= rank < len(members):
        raise GroupError(f"group {name} has members 0 to {len(members) - 1}, and no {rank}")
    group = Group(name, rank, members, host, port, store)
    try:
        group.meet(deadline, given_up)
    except RuntimeError as error:
        if isinstance(error, WireError):
            group.fail(str(error))
            raise
        raise _unreachable(host, port, error) from error
    return group


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A connection to a listener's store, whose waits last ``timeout_s`` seconds at most.

    Raises:
        TransportError: nobody answers there.
    """
    deadline, limit = time.monotonic() + max(timeout_s, 5 * ATTEMPT_S), timedelta(seconds=ATTEMPT_S)
    failure: RuntimeError | None = None
    while failure is None or time.monotonic() < deadline:
        try:
            socket.create_connection(
                (host, port), timeout=max(timeout_s, 0.1)
            ).close()  # tells at once that nobody is there
        except OSError as error:
            raise _unreachable(host, port, error) from error
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            break
        except RuntimeError as error:
            failure = error
    else:
        raise _unreachable(host, port, failure) from failure
    store.set_timeout(timedelta(seconds=max(timeout_s, 0.1)))
    return store


def _unreachable(host: str, port: int, error: Exception) -> TransportError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return TransportError(f"no store answers at {host}:{port}: the sender is gone, or not reachable ({reason})")


def _fields(text: str, kinds: Sequence[type]) -> Any:
    """A list of values of these types, out of the store."""
    values = json.loads(text)
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise TransportError(f"the store holds {text!r:.80}, which is not a record of a member")
    return values
