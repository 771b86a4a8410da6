"""Membership of one update: the sender and its receivers join a group and learn who is missing, has failed, or is gone.

A :class:`Listener` is a torch store on a port chosen by the system. It announces groups; the members learn the address and the
name of their group out of band (an authenticated request to an engine). Members may join in any order, and a name is used once.
Every member writes a heartbeat with its progress to the store, so that an error can name the member at fault.

The store is not authenticated: it binds to one address, loopback by default, and what must not be forged (manifest, digests)
does not go through it.
"""

from __future__ import annotations

import contextlib
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
"""Interval of a member's heartbeats, in seconds."""
SILENCE_S = 30.0
"""A member without a heartbeat for this long counts as gone, in seconds."""
EXPLAIN_S = 3.0
"""Longest time that :meth:`Group.explain` waits for evidence of the member at fault, in seconds."""
STORE_S = 5.0
"""Deadline of one request to the store, in seconds."""
PROBE_S = 1.0
"""Deadline of a connection that only tests whether the listener's port is open, in seconds."""
ATTEMPT_S = 6.0
"""Deadline of one attempt to connect to the store: torch looks up every address's name in DNS, which may take 5 s."""
MOST_MEMBERS = 4096


class Listener:
    """Store in which groups meet. Lives as long as the trainer: it must outlive its groups.

    Args:
        host: address or name of an interface of this machine: the store binds to it, and members connect to it.

    Raises:
        TransportError: it cannot bind there.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            server_socket = socket.socket(family, kind)
            server_socket.bind(address)
            server_socket.listen(1024)
        except OSError as error:
            raise TransportError(f"cannot listen on {host!r}: {error}") from error
        self.host, self.port = host, int(server_socket.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server_socket.detach(),  # bound by us: TCPStore itself would bind to every address
            timeout=timedelta(seconds=STORE_S),
        )
        self._count = 0

    def new_group(self, members: Sequence[str]) -> str:
        """Announce a group that is used once; return its unique name.

        Args:
            members: names for messages: the sender first, then the receivers.
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
        """Stop listening. Open groups lose their store."""
        self._store = None


@dataclass(frozen=True)
class Heartbeat:
    """Last record of another member; ``changed`` is the time of its last change (``time.monotonic()``)."""

    beat: int
    progress: int
    left: bool
    changed: float


class Records:
    """Records of one group in the store, all of them texts. No call waits for a record to appear.

    A lock serialises the calls: the watcher's thread uses the same connection as the caller's.

    Raises, in any method:
        RuntimeError: the store does not answer.
    """

    def __init__(self, store: Store, group: str) -> None:
        self._store, self._group = store, group
        self._lock = threading.Lock()

    def get(self, name: str) -> str | None:
        """Return a record; None if it does not exist yet."""
        key = f"{self._group}/{name}"
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def put(self, name: str, text: str) -> None:
        """Write a record."""
        with self._lock:
            self._store.set(f"{self._group}/{name}", text)

    def put_once(self, name: str, text: str) -> None:
        """Write a record unless it exists."""
        with self._lock:
            self._store.compare_set(f"{self._group}/{name}", "", text)

    def count(self, name: str) -> int:
        """Increment a counter that all members share, and return it."""
        with self._lock:
            return self._store.add(f"{self._group}/{name}", 1)


class Group:
    """One member's view of a group that is complete. Created by :func:`join`.

    Attributes:
        name: of the group.
        rank: of this member; rank 0 sends.
        members: names for messages, by rank.
        host, port: address of the listener.
    """

    def __init__(self, name: str, rank: int, members: Sequence[str], host: str, port: int, store: Store) -> None:
        self.name, self.rank, self.members = name, rank, tuple(members)
        self.host, self.port = host, port
        self._records = Records(store, name)
        self._identities: dict[int, Identity] = {}
        # The sender watches every receiver. Receivers watch the sender alone, which reports what it knows of the others.
        self._watched = range(1, len(members)) if rank == 0 else range(1)
        self._heartbeats: dict[int, Heartbeat] = {}
        self._lost: PeerLostError | None = None
        self._at_fault = True  # False if the member that reported a failure only waited for another one
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
        """Return the members' processes, by rank."""
        return tuple(self._identities[rank] for rank in range(self.size))

    def member(self, rank: int) -> str:
        """Return a member's name for messages, with its process if that is known."""
        role = "the sender" if rank == 0 else f"receiver {rank}"
        process = f", {self._identities[rank]}" if rank in self._identities else ""
        return f"{role} ({self.members[rank]}{process})"

    def store(self, purpose: str, timeout_s: float) -> Store:
        """Open a store private to this group and ``purpose``, over a new connection, with ``timeout_s`` as its deadline.

        Raises:
            TransportError: the listener does not answer.
        """
        return PrefixStore(f"{self.name}/{purpose}", connect(self.host, self.port, timeout_s))

    def progress(self, buckets: int) -> None:
        """Set the number of buckets that this member has finished; the next heartbeat reports it."""
        self._progress = buckets

    def progress_of(self, rank: int) -> int:
        """Return the number of buckets that another member had finished at its last heartbeat."""
        last = self._heartbeats.get(rank)
        return 0 if last is None else last.progress

    def check(self) -> None:
        """Raise PeerLostError if a member is known to have failed or gone. Reads only local state."""
        if self._lost is not None:
            raise PeerLostError(str(self._lost))

    def abandon(self, reason: str) -> None:
        """Make :meth:`check` raise on this member, which ends a wait in another thread."""
        self._lost = self._lost or PeerLostError(f"given up: {reason}")

    def acknowledge(self, event: str) -> None:
        """Report an event that other members wait for."""
        try:
            self._records.put(f"{event}/{self.rank}", "1")
        except RuntimeError as error:
            raise TransportError(f"the store does not answer: {error}") from error

    def await_receivers(self, event: str, timeout_s: float) -> None:
        """Wait until every receiver has acknowledged an event.

        Raises:
            DeadlineError: not within ``timeout_s`` seconds; the message names the receivers that did not.
            PeerLostError: a member is lost.
            TransportError: the store does not answer.
        """
        deadline, pause = time.monotonic() + timeout_s, 0.0005
        missing = list(range(1, self.size))
        while True:
            try:
                missing = [rank for rank in missing if self._records.get(f"{event}/{rank}") is None]
            except RuntimeError as error:
                raise TransportError(f"the store does not answer: {error}") from error
            if not missing:
                return
            self.check()
            if time.monotonic() > deadline:
                names = ", ".join(map(self.member, missing))
                raise DeadlineError(f"timed out after {timeout_s:g} s waiting for {event!r} from {names}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def fail(self, reason: str, *, at_fault: bool = True) -> None:
        """Report to all members that this one has failed. The first report of a group counts.

        Args:
            at_fault: this member caused the failure. If False, the others look for the member that it waited for.
        """
        text = json.dumps([self.rank, reason[:2000], int(at_fault)])
        try:
            self._records.put_once("failure", text)
        except RuntimeError as error:
            log.debug("%s could not report its failure: %s", self.member(self.rank), error)

    def explain(self, error: WireError, activity: str) -> WireError:
        """Turn a transport's error into one that names the member at fault, if it can be identified.

        Waits up to :data:`EXPLAIN_S`: a transport notices a broken connection before heartbeats are overdue.

        Args:
            activity: of this member: ``"sending bucket 3 of 12"``.
        """
        prefix = f"{self.member(self.rank)}, {activity}"
        deadline = time.monotonic() + EXPLAIN_S
        beats = {rank: self._heartbeats[rank].beat for rank in self._watched if rank in self._heartbeats}
        while time.monotonic() < deadline and not self._halted():
            self._look()
            if self._lost is not None and self._at_fault:
                return PeerLostError(f"{prefix}: {self._lost}")
            # Two heartbeats on, since the first may have been under way before the error.
            if beats and all(self._has_left(rank) or self._heartbeats[rank].beat > beats[rank] + 1 for rank in beats):
                break
            self._ended.wait(0.05)
        silent = {rank for rank in beats if self._heartbeats[rank].beat == beats[rank] and not self._has_left(rank)}
        halted = self._halted()
        state = self._describe()
        if halted or silent:
            phrases = {"ended": "is gone: its process has ended", "stopped": "is stopped"}
            reasons = [f"{self.member(rank)} {phrases[process]}" for rank, process in halted.items()]
            reasons += [f"{self.member(rank)} sends no heartbeats" for rank in sorted(silent - halted.keys())]
            kind = DeadlineError if isinstance(error, DeadlineError) else PeerLostError
            return kind(f"{prefix}: {', '.join(reasons)} ({error}); {state}")
        if self._lost is not None:
            return PeerLostError(f"{prefix}: {self._lost}; {state}")
        return type(error)(f"{prefix}: {error}; {state}")

    def _has_left(self, rank: int) -> bool:
        """Check whether a member has closed the group, so that the end of its process means nothing."""
        last = self._heartbeats.get(rank)
        return last is not None and last.left

    def _halted(self) -> dict[int, str]:
        """Return the state of members on this machine whose processes are stopped, or ended without leaving."""
        peers = ((rank, identity) for rank, identity in self._identities.items() if rank != self.rank)
        states = {rank: identity.state() for rank, identity in peers if not self._has_left(rank)}
        return {rank: state for rank, state in states.items() if state is not None}

    def _describe(self) -> str:
        """Describe the progress of the watched members, and the age of their heartbeats."""
        parts, now = [], time.monotonic()
        for rank in self._watched:
            last = self._heartbeats.get(rank)
            if last is None:
                parts.append(f"{self.member(rank)} has sent no heartbeat")
            else:
                age = "has left" if last.left else f"last heard of {max(0.0, now - last.changed):.1f} s ago"
                parts.append(f"{self.member(rank)} has done {last.progress} buckets, {age}")
        return "; ".join(parts)

    def close(self) -> None:
        """Leave the group. When the sender leaves, the group ends: nobody can join it any more."""
        if self._ended.is_set():
            return
        self._left = True
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(STORE_S + BEAT_S)
        try:
            self._beat_once()
            if self.rank == 0:
                self._records.put("ended", "1")
        except RuntimeError as error:
            log.debug("%s left, but the store does not answer: %s", self.member(self.rank), error)

    # --- joining ---

    def meet(self, deadline: float, given_up: threading.Event | None = None) -> None:
        """Claim this member's rank, and wait until all members have claimed theirs. Called by :func:`join`."""
        if self._records.get("ended") is not None:
            raise GroupError(f"group {self.name} has ended; names are used once")
        if self._records.count(f"claims/{self.rank}") != 1:
            raise GroupError(
                f"the rank of {self.member(self.rank)} in group {self.name} is taken: it was assigned twice, or the group is "
                "used again"
            )
        self._records.put(f"here/{self.rank}", json.dumps(Identity.current().to_json()))
        pause = 0.002
        while missing := [rank for rank in range(self.size) if not self._has_joined(rank)]:
            if (failure := self._failure()) is not None:
                # The same error as on the member whose deadline passed first, but for those that have joined since.
                late = [rank for rank in self._reported_missing() if rank in missing]
                raise self._join_timeout(late) if late else failure
            for rank, identity in self._identities.items():
                if rank != self.rank and identity.state() == "ended":
                    raise PeerLostError(f"{self.member(rank)} has ended before the group was complete")
            if given_up is not None and given_up.is_set():
                raise PeerLostError(f"{self.member(self.rank)} gave up before the group was complete")
            if time.monotonic() > deadline:
                self._records.put_once("missing", json.dumps(missing))
                raise self._join_timeout(missing)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        if self._reported_missing() and (failure := self._failure()) is not None:
            raise failure  # the last member joined too late: the others have given up
        self._watcher = threading.Thread(target=self._watch, name=f"weightwire-{self.name}", daemon=True)
        self._watcher.start()

    def _join_timeout(self, ranks: list[int]) -> DeadlineError:
        names = ", ".join(map(self.member, ranks))
        return DeadlineError(
            f"{self.member(self.rank)}: timed out waiting for members to join group {self.name}: {names}"
        )

    def _reported_missing(self) -> list[int]:
        """Return the ranks that were missing when the first deadline passed; empty if none has."""
        text = self._records.get("missing")
        ranks = [] if text is None else json.loads(text)
        return ranks if isinstance(ranks, list) else []

    def _has_joined(self, rank: int) -> bool:
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
                self._beat_once()
                self._look()
            except RuntimeError as error:
                log.debug("%s: %s", self.member(self.rank), error)
                self._note_silent_store(error)
            if self._lost is not None:
                return

    def _beat_once(self) -> None:
        self._records.put(f"alive/{self.rank}", json.dumps([self._beat, self._progress, int(self._left)]))

    def _look(self) -> None:
        """Set ``_lost`` if a member has failed or gone. An ended process is seen at once, silence after :data:`SILENCE_S`."""
        if self._lost is not None:
            return
        for rank, process in self._halted().items():
            if process == "ended":
                # Its last record may say that it has left; a store that does not answer cannot tell.
                with contextlib.suppress(RuntimeError):
                    self._read_heartbeat(rank, time.monotonic())
                    if self._has_left(rank):
                        continue
                self._lost = PeerLostError(f"{self.member(rank)} is gone: it has ended{self._progress_note(rank)}")
                return
        try:
            self._lost = self._failure()
            now = time.monotonic()
            for rank in self._watched:
                self._read_heartbeat(rank, now)
            self._unanswered = 0.0
        except RuntimeError as error:
            self._note_silent_store(error)
            return
        for rank in self._watched:
            last = self._heartbeats[rank]
            if self._lost is None and not last.left and now - last.changed > SILENCE_S:
                process = self._identities[rank].state()
                symptom = f"is {process}" if process else "sends no heartbeats"
                self._lost = PeerLostError(
                    f"{self.member(rank)} {symptom}, for {SILENCE_S:g} s{self._progress_note(rank)}"
                )

    def _read_heartbeat(self, rank: int, now: float) -> None:
        text = self._records.get(f"alive/{rank}")
        beat, progress, left = (0, 0, 0) if text is None else _fields(text, (int, int, int))
        last = self._heartbeats.get(rank)
        if last is None or (last.beat, last.progress, last.left) != (beat, progress, bool(left)):
            self._heartbeats[rank] = Heartbeat(beat, progress, bool(left), now)

    def _note_silent_store(self, error: RuntimeError) -> None:
        """Set ``_lost`` if the sender, whose process holds the store, has ended or no longer listens."""
        now = time.monotonic()
        self._unanswered = self._unanswered or now
        sender = self._identities.get(0)
        state = None if sender is None else sender.state()
        if self.rank != 0 and (state == "ended" or not self._listening() or now - self._unanswered > SILENCE_S):
            reason = f"its process has {state}" if state else "its store does not answer"
            self._lost = PeerLostError(f"{self.member(0)} is gone: {reason} ({str(error)[:200]})")

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
        last = self._heartbeats.get(rank)
        return "" if last is None or rank == 0 else f"; it had done {last.progress} buckets"

    def _failure(self) -> PeerLostError | None:
        text = self._records.get("failure")
        if text is None:
            return None
        rank, reason, at_fault = _fields(text, (int, str, int))
        if rank == self.rank or not 0 <= rank < self.size:
            return None
        self._at_fault = bool(at_fault)
        return PeerLostError(f"{self.member(rank)} has failed: {reason}")


def join(
    host: str, port: int, name: str, rank: int, timeout_s: float, given_up: threading.Event | None = None
) -> Group:
    """Join a group, and return when all its members have joined.

    Args:
        host, port: address of the listener.
        name: of the group, from :meth:`Listener.new_group`.
        rank: in the group: 0 sends, the others receive.
        given_up: ends the wait early, with a PeerLostError, when set.

    Raises:
        GroupError: the group does not exist, has ended, or the rank is taken.
        DeadlineError: members did not join within ``timeout_s`` seconds; the message names them.
        PeerLostError: a member ended or failed before the group was complete.
        TransportError: nobody listens at the address.
    """
    deadline = time.monotonic() + timeout_s
    store = connect(host, port, STORE_S)
    try:
        if not store.check([f"{name}/members"]):
            raise GroupError(f"unknown group {name!r:.120} at {host}:{port}")
        members = json.loads(store.get(f"{name}/members"))
    except RuntimeError as error:
        if isinstance(error, WireError):
            raise
        raise _unreachable(host, port, error) from error
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        raise GroupError(f"group {name!r:.120} has no list of members")
    if not 0 <= rank < len(members):
        raise GroupError(f"group {name} has members 0 to {len(members) - 1}, not {rank}")
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
    """Connect to a listener's store; its requests have ``timeout_s`` seconds as their deadline.

    Raises:
        TransportError: nobody answers there.
    """
    deadline, limit = time.monotonic() + max(timeout_s, 5 * ATTEMPT_S), timedelta(seconds=ATTEMPT_S)
    failure: RuntimeError | None = None
    while failure is None or time.monotonic() < deadline:
        try:
            # TCPStore retries a refused connection until its deadline; this fails at once.
            socket.create_connection((host, port), timeout=max(timeout_s, 0.1)).close()
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
    """Parse a record: a JSON list of values of these types."""
    values = json.loads(text)
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise TransportError(f"the store holds {text!r:.80}, which is not a record of a member")
    return values
