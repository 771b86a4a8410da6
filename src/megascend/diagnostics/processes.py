"""Whether a process of the same machine is still there. On Linux; elsewhere nothing is known."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process, so that another one can tell whether it sees it, and whether it is still the same.

    Attributes:
        machine: the boot and the process namespace; "" if unknown.
        started: in clock ticks since the boot: a number that has been given to another process later does not match.
    """

    machine: str = ""
    number: int = 0
    started: int = 0

    @classmethod
    def own(cls) -> Process:
        """The calling process."""
        try:
            boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
            return cls(machine, os.getpid(), _stat(os.getpid())[1])
        except OSError:  # no Linux, or no access to /proc: nothing can be said about processes then
            return cls(number=os.getpid())

    def state_seen_by(self, reader: Process) -> str:
        """``"ended"``, ``"stopped"``, ``"running"``, or ``"unknown"`` if it is not one that ``reader`` can see."""
        if not self.machine or self.machine != reader.machine:
            return "unknown"
        try:
            state, started = _stat(self.number)
        except (FileNotFoundError, ProcessLookupError):
            return "ended"
        except OSError:
            return "unknown"
        if started != self.started or state in "ZXx":
            return "ended"
        return "stopped" if state == "T" else "running"


def _stat(number: int) -> tuple[str, int]:
    """State and start time, fields 3 and 22 of ``/proc/N/stat`` (proc(5)); the name before them may hold anything."""
    fields = (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
