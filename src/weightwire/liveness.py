"""Failure detection: states of processes on this machine, from /proc, and heartbeats of any others through a torch store.

A state from /proc is certain and immediate. Of a process elsewhere, only its heartbeats are seen: records in a store, each with
a counter. Clocks of machines are never compared: only the changes of the counter are timed, by the clock of the observer.

Imports no torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store


class Beat(Protocol):
    """Record of a process that writes one periodically."""

    @property
    def heartbeat(self) -> int:
        """Return the number of the record: each has another one than the record before."""
        ...


B = TypeVar("B", bound=Beat)


def read_records(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """Return the values of ``keys``; None for those that are not written yet. RuntimeError: the store does not answer."""
    # Checked first: a torch store waits for a missing key, for as long as its deadline, and blocks the connection.
    present = list(keys) if store.check(list(keys)) else [key for key in keys if store.check([key])]
    values = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [values.get(key) for key in keys]


class HeartbeatObserver(Generic[B]):
    """Last record of each peer, and the time since which it has not changed.

    Times are those of ``time.monotonic()``, passed in by the caller.

    Attributes:
        records: last record of each peer that has written one, by rank.
        polled: time of the last update.
    """

    def __init__(self) -> None:
        self.records: dict[int, B] = {}
        self.polled = float("-inf")
        self._unchanged_since: dict[int, float] = {}
        self._advanced: dict[int, float] = {}  # time after which the last new heartbeat was written

    def update(self, records: Mapping[int, B | None], now: float, timeout_s: float) -> None:
        """Take note of the peers' records as of ``now``; None for a peer without one.

        Args:
            timeout_s: longest expected time between two updates. After a longer gap this process may have been stopped, and
                the peers with it, so silence is counted from now on only.
        """
        resumed = now - self.polled > timeout_s
        for rank, record in records.items():
            if record is None:
                continue
            last = self.records.get(rank)
            # Any other number, not a larger one: records are compared, never ordered.
            advanced = last is not None and last.heartbeat != record.heartbeat
            if advanced:
                # After the last update, when it was not there yet: it may have been written long before this one.
                self._advanced[rank] = self.polled
            if last is None or advanced or resumed:
                self.records[rank], self._unchanged_since[rank] = record, now
        self.polled = now

    def silent_s(self, rank: int) -> float:
        """Return the seconds for which a peer's record had not changed at the last update."""
        return self.polled - self._unchanged_since[rank]

    def has_advanced(self, rank: int, since: float) -> bool:
        """Check whether a peer has written a new record after ``since``."""
        return self._advanced.get(rank, float("-inf")) > since


@dataclass(frozen=True)
class Identity:
    """Identity of a process, by which others on its machine can check it.

    Attributes:
        host: name of its machine.
        space: boot id of the machine and pid namespace; a process of another one cannot be checked.
        pid: process id.
        started: start time in ticks since boot: pids are reused.
    """

    host: str
    space: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Identity:
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> list[Any]:
        return [self.host, self.space, self.pid, self.started]

    def state(self) -> str | None:
        """Return ``running``, ``stopped`` or ``ended``; None if the process cannot be checked from here."""
        # Another pid namespace has other processes under the same numbers.
        if not self.space or self.space != _space() or self.started < 0:
            return None
        try:
            fields = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
            return "ended"
        except OSError:
            return None
        # A zombie (Z) has ended, although its number is still taken; another start time means that the number was reused.
        if int(fields[19]) != self.started or fields[0] in "ZX":
            return "ended"
        return "stopped" if fields[0] in "Tt" else "running"


def memory_space() -> str:
    """Return a key equal for processes that can share memory: boot, pid and IPC namespaces, user; empty off Linux."""
    try:
        return f"{_space()} {os.readlink('/proc/self/ns/ipc')} {os.getuid()}" if _space() else ""
    except OSError:
        return ""


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux: only heartbeats remain


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: the first is the state, the 20th the start time."""
    # The name is in parentheses and may itself contain spaces and parentheses: fields are counted from the last one.
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _started(pid: int) -> int:
    try:
        return int(_stat(pid)[19])
    except OSError:
        return -1
