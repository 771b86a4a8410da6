"""Membership of one update: the sender and its receivers join a group and learn who is missing, has failed, or is gone.

A :class:`Listener` is a torch store on a port chosen by the system. It announces groups; the members learn the address and the
name of their group out of band (an authenticated request to an engine). Members may join in any order, and a name is used once.
Every member writes a heartbeat with its progress to the store (:mod:`weightwire.peers`), so that an error can name the member
at fault.

The store is not authenticated: it binds to one address, loopback by default, and what must not be forged (manifest, digests)
does not go through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from weightwire.errors import DeadlineError, GroupError, PeerLostError, TransportError, WireError
from weightwire.peers import STORE_S, Peers, poll_pause

log = logging.getLogger(__name__)

EXPLAIN_S = 3.0
"""Longest time that :meth:`Group.explain` waits for evidence of the member at fault, in seconds."""
ATTEMPT_S = 6.0
"""Deadline of one attempt to connect to the store: torch looks up every address's name in DNS, which may take 5 s."""
MAX_MEMBERS = 4096
KEPT_GROUPS = 8
"""Groups of a listener whose records are kept: members that are slow to leave still read them."""


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
            # Many members may connect at once; connections beyond the backlog are dropped and retried.
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
        self._names: deque[str] = deque()

    def new_group(self, members: Sequence[str], senders: int = 1) -> str:
        """Announce a group that is used once; return its unique name.

        Args:
            members: names for messages: the senders first, then the receivers.
            senders: number of senders; the first one coordinates.
        """
        if self._store is None:
            raise GroupError("the listener is closed")
        if not 2 <= len(members) <= MAX_MEMBERS:
            raise GroupError(f"a group has a sender and 1 to {MAX_MEMBERS - 1} receivers, not {len(members)} members")
        # A name is never used twice, even by two listeners of one trainer: a member of an old update must not join a new one.
        self._count += 1
        name = f"update-{self._count}-{uuid.uuid4().hex}"
        self._store.set(f"{name}/senders", str(senders))
        # Last: a member that finds the list expects the rest.
        self._store.set(f"{name}/members", json.dumps(list(members)))
        self._names.append(name)
        if len(self._names) > KEPT_GROUPS:
            self._remove(self._store, self._names.popleft())
        return name

    def _remove(self, store: TCPStore, name: str) -> None:
        """Delete the records of a group that has ended: with a key for each message, a long run would fill the memory."""
        list_keys = getattr(store, "list_keys", None)  # older versions of torch have none
        if list_keys is not None and store.check([f"{name}/ended"]):
            for key in list_keys():
                if key.startswith(f"{name}/"):
                    store.delete_key(key)

    def close(self) -> None:
        """Stop listening. Open groups lose their store."""
        self._store = None


class Group(Peers):
    """One member's view of a group that is complete. Created by :func:`join`."""

    @property
    def size(self) -> int:
        return len(self.members)

    def store(self, purpose: str, timeout_s: float) -> Store:
        """Open a store private to this group and ``purpose``, over a new connection, with ``timeout_s`` as its deadline."""
        return PrefixStore(f"{self.name}/{purpose}", connect(self.host, self.port, timeout_s))

    def check(self) -> None:
        """Raise PeerLostError if a member is known to have failed or gone. Reads only local state."""
        if (lost := self.lost) is not None:
            raise PeerLostError(str(lost))  # a new one: an exception raised twice would collect both tracebacks

    def abandon(self, reason: str) -> None:
        """Make :meth:`check` raise on this member, which ends a wait in another thread."""
        self.lost = self.lost or PeerLostError(f"given up: {reason}")

    # --- events ---

    def acknowledge(self, event: str, text: str = "1") -> None:
        """Report an event to all members, over this group's own connection; TransportError if the store does not answer."""
        try:
            self._records.write(f"{event}/{self.rank}", text)
        except RuntimeError as error:
            raise TransportError(f"the store does not answer: {error}") from error

    def await_receivers(self, event: str, timeout_s: float, ranks: Iterable[int] | None = None) -> list[str]:
        """Wait until members have acknowledged an event: those of ``ranks``; default: all but rank 0. Return their texts.

        Raises:
            DeadlineError: not within ``timeout_s`` seconds; the message names the members that did not.
            PeerLostError: a member is lost.
            TransportError: the store does not answer.
        """
        # Polled: the store's own wait could not be ended when a member is lost.
        start = time.monotonic()
        texts: dict[int, str | None] = dict.fromkeys(range(1, self.size) if ranks is None else ranks)
        while True:
            missing = [rank for rank, text in texts.items() if text is None]
            try:
                answers = self._records.get_all([f"{event}/{rank}" for rank in missing])
            except RuntimeError as error:
                raise TransportError(f"the store does not answer: {error}") from error
            texts.update(zip(missing, answers, strict=True))
            missing = [rank for rank, text in texts.items() if text is None]
            if not missing:
                return [text for text in texts.values() if text is not None]
            self.check()
            waited = time.monotonic() - start
            if waited > timeout_s:
                names = ", ".join(map(self.member, missing))
                raise DeadlineError(f"timed out after {timeout_s:g} s waiting for {event!r} from {names}")
            time.sleep(poll_pause(waited))

    # --- failures ---

    def fail(self, reason: str, *, at_fault: bool = True) -> None:
        """Report to all members that this one has failed. The first report of a group counts.

        Args:
            at_fault: this member caused the failure. If False, the others look for the member that it waited for.
        """
        text = json.dumps([self.rank, reason[:2000], int(at_fault)])
        try:
            # Once: the first failure is the cause, and those after it are its consequences on other members.
            self._records.write_once("failure", text)
        except RuntimeError as error:
            log.debug("%s could not report its failure: %s", self.member(self.rank), error)

    def explain(self, error: WireError, activity: str) -> WireError:
        """Turn a transport's error into one that names the member at fault, if it can be identified.

        Waits up to :data:`EXPLAIN_S`: a transport notices a broken connection before heartbeats are overdue.

        Args:
            activity: activity of this member: ``"sending bucket 3 of 12"``.
        """
        prefix = f"{self.member(self.rank)}, {activity}"
        deadline, before = time.monotonic() + EXPLAIN_S, self.beats()
        while time.monotonic() < deadline and not self.halted_members():
            self.poll()
            if self.lost is not None and self.at_fault:
                return PeerLostError(f"{prefix}: {self.lost}")
            # Two further heartbeats of every member: the first may have been sent before the error.
            beats = self.beats()
            if before and all(self.has_left(rank) or beats[rank] > before[rank] + 1 for rank in before):
                break
            self.ended.wait(0.05)
        beats, halted, state = self.beats(), self.halted_members(), self.report()
        silent = {rank for rank in before if beats[rank] == before[rank] and not self.has_left(rank)}
        if halted or silent:
            phrases = {"ended": "is gone: its process has ended", "stopped": "is stopped"}
            reasons = [f"{self.member(rank)} {phrases[process]}" for rank, process in halted.items()]
            reasons += [f"{self.member(rank)} sends no heartbeats" for rank in sorted(silent - halted.keys())]
            kind = DeadlineError if isinstance(error, DeadlineError) else PeerLostError
            return kind(f"{prefix}: {', '.join(reasons)} ({error}); {state}")
        if self.lost is not None:
            return PeerLostError(f"{prefix}: {self.lost}; {state}")
        return type(error)(f"{prefix}: {error}; {state}")

    def close(self) -> None:
        """Leave the group. When the sender leaves, the group ends: nobody can join it any more."""
        if self.leave() and self._store is not None:
            _keep_idle(self.host, self.port, self._store)
        self._store = None


def join(
    host: str, port: int, name: str, rank: int, timeout_s: float, abandoned: threading.Event | None = None
) -> Group:
    """Join a group, and return when all its members have joined.

    Args:
        host, port: address of the listener.
        name: name of the group, from :meth:`Listener.new_group`.
        rank: rank in the group: 0 sends, the others receive.
        abandoned: ends the wait early, with a PeerLostError, when set.

    Raises:
        GroupError: the group does not exist, has ended, or the rank is taken.
        DeadlineError: members did not join within ``timeout_s`` seconds; the message names them.
        PeerLostError: a member ended or failed before the group was complete.
        TransportError: nobody listens at the address.
    """
    deadline = time.monotonic() + timeout_s
    store = _take_idle(host, port) or connect(host, port, STORE_S)
    try:
        if not store.check([f"{name}/members"]):
            raise GroupError(f"unknown group {name!r:.120} at {host}:{port}")
        members, senders = json.loads(store.get(f"{name}/members")), json.loads(store.get(f"{name}/senders"))
    except RuntimeError as error:
        if isinstance(error, WireError):
            raise
        raise _unreachable(host, port, error) from error
    # The store is not authenticated: its content is checked like any other input.
    texts = isinstance(members, list) and all(isinstance(member, str) for member in members)
    if not texts or type(senders) is not int:
        raise GroupError(f"group {name!r:.120} has no list of members")
    if not 0 <= rank < len(members):
        raise GroupError(f"group {name} has members 0 to {len(members) - 1}, not {rank}")
    group = Group(name, rank, members, host, port, store, senders)
    try:
        group.join(deadline, abandoned)
    except RuntimeError as error:
        if isinstance(error, WireError):
            # The others wait for this member, and would otherwise learn of it at their own deadline.
            group.fail(str(error))
            raise
        raise _unreachable(host, port, error) from error
    return group


_idle: dict[tuple[int, str, int], list[TCPStore]] = {}
"""Connections of groups that have ended, by process, host and port. Making one may wait for a name server (see ATTEMPT_S)."""
_idle_lock = threading.Lock()
MAX_IDLE = 4
"""Idle connections of a process that are kept for one listener. Those to other listeners are dropped."""


def _keep_idle(host: str, port: int, store: Store) -> None:
    """Keep the connection of a group that has ended for the next group of the same listener."""
    key = os.getpid(), host, port
    with _idle_lock:
        # A forked process must leave its parent's connections alone, also their destructors.
        for other in [other for other in _idle if other != key and other[0] == key[0]]:
            del _idle[other]
        idle = _idle.setdefault(key, [])
        if isinstance(store, TCPStore) and len(idle) < MAX_IDLE:
            idle.append(store)


def _take_idle(host: str, port: int) -> TCPStore | None:
    """Return an idle connection that answers; None without one."""
    while True:
        with _idle_lock:
            idle = _idle.get((os.getpid(), host, port))
            if not idle:
                return None
            store = idle.pop()
        with contextlib.suppress(RuntimeError):  # its listener has ended
            store.check(["weightwire"])
            return store


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a listener's store; its requests have ``timeout_s`` seconds as their deadline."""
    # Several attempts: one that fails may only have waited for DNS (see ATTEMPT_S).
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
    # Attempts to connect and requests have different deadlines, and torch has one setting for both.
    store.set_timeout(timedelta(seconds=max(timeout_s, 0.1)))
    return store


def _unreachable(host: str, port: int, error: Exception) -> TransportError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return TransportError(f"no store answers at {host}:{port}: the sender is gone, or not reachable ({reason})")
