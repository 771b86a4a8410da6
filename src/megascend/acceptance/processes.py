"""Programs of a section: started in a process group of their own, which is ended as a whole when its time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TERMINATE_S = 40.0
"""torchrun gives its workers 30 s to end after a SIGTERM, then kills them: each rank is in a session of its own."""
TAIL_LINES = 60


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, or None if it was not done within its deadline; and the end of its output."""

    code: int | None
    tail: str
    seconds: float

    def problem(self, deadline_s: float) -> str:
        """In words; empty if it ended with 0."""
        if self.code is None:
            return f"not done after {deadline_s:.0f} s"
        return f"exit code {self.code}" if self.code else ""


def run(command: Sequence[str], log: Path, deadline_s: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` with its output in ``log``. Nothing of it is left when this returns."""
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(os.environ | (environment or {})),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines()
    return Ended(code, "\n".join(lines[-TAIL_LINES:]), time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program's process group: first asked, then killed."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module on so many cards of this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "-m", module, *arguments]
