"""Whether a process of this machine still runs; told at once and for certain, where heartbeats need time."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Identity:
    """A process, as others can look for it.

    Attributes:
        host: name of its machine.
        space: boot of the machine and namespace of process ids; a process of another one cannot be looked for.
        pid: its id.
        started: when it started, in ticks since the boot: ids are used again.
    """

    host: str
    space: str
    pid: int
    started: int

    @classmethod
    def mine(cls) -> Identity:
        """This process."""
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> list[Any]:
        """Plain data."""
        return [self.host, self.space, self.pid, self.started]

    def state(self) -> str | None:
        """``ended`` or ``stopped``, if that can be seen from here; otherwise None."""
        if not self.space or self.space != _space() or self.started < 0:
            return None
        try:
            fields = _stat(self.pid)
        except (
            FileNotFoundError,
            ProcessLookupError,
        ):  # the second, if it goes between opening the file and reading it
            return "ended"
        except OSError:
            return None
        if int(fields[19]) != self.started or fields[0] in "ZX":
            return "ended"
        return "stopped" if fields[0] in "Tt" else None


def memory_space() -> str:
    """Return what is equal for processes that can share memory: boot, namespaces of processes and IPC, user; empty off Linux."""
    try:
        return f"{_space()} {os.readlink('/proc/self/ns/ipc')} {os.getuid()}" if _space() else ""
    except OSError:
        return ""


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux: heartbeats alone


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: the first one is the state, the 20th the start."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _started(pid: int) -> int:
    try:
        return int(_stat(pid)[19])
    except OSError:
        return -1
