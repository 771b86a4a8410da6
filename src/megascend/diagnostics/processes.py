"""Whether a process of the same machine is still there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

SAME_S = 0.5
"""By how many seconds two start times of one process may differ."""


@dataclass(frozen=True)
class Process:
    """A process, so that another one can tell whether it sees it, and whether it is still the same.

    Attributes:
        machine: the boot and the process namespace; "" if unknown, as anywhere but on Linux.
        started: in seconds since the boot, which no change of the clock touches: a number that has been given to another
            process later does not match.
    """

    machine: str = ""
    number: int = 0
    started: float = 0.0

    @classmethod
    def own(cls) -> Process:
        """The calling process."""
        number = os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            return cls(f"{boot}/{os.readlink('/proc/self/ns/pid')}", number, started(number))
        except (OSError, psutil.Error):  # no Linux, or no access: nothing can be said about processes then
            return cls(number=number)

    def state_seen_by(self, reader: Process) -> str:
        """``"ended"``, ``"stopped"``, ``"running"``, or ``"unknown"`` if it is not one that ``reader`` can see."""
        if not self.machine or self.machine != reader.machine:
            return "unknown"
        try:
            state, begun = psutil.Process(self.number).status(), started(self.number)
        except psutil.NoSuchProcess:
            return "ended"
        except psutil.Error:
            return "unknown"
        if abs(begun - self.started) > SAME_S or state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "ended"
        return "stopped" if state == psutil.STATUS_STOPPED else "running"


def started(number: int) -> float:
    """When process ``number`` began, in seconds since the boot.

    Raises:
        psutil.Error: there is none, or it cannot be looked at.
    """
    boot = psutil.boot_time()  # first: psutil adds it to what the system says, and this takes it off again
    return psutil.Process(number).create_time() - boot
