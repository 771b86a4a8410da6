"""State of a process on this machine, from /proc: certain and immediate, where heartbeats need time."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        """Return the identity of this process."""
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> list[Any]:
        """Return plain data."""
        return [self.host, self.space, self.pid, self.started]

    def state(self) -> str | None:
        """Return ``ended`` or ``stopped``; None if the process runs or cannot be checked from here."""
        # Another pid namespace has other processes under the same numbers.
        if not self.space or self.space != _space() or self.started < 0:
            return None
        try:
            fields = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
            return "ended"
        except OSError:
            return None
        # A zombie (Z) has ended, although its number is still taken; another start time means that the number was
        # reused.
        if int(fields[19]) != self.started or fields[0] in "ZX":
            return "ended"
        return "stopped" if fields[0] in "Tt" else None


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
