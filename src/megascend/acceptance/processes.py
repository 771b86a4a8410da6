"""Programs of a section: started with a deadline, and ended with all that they have started."""

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

import psutil

from megascend.distributed.launch import child_environment

TERMINATE_S = 40.0
"""Between being asked to end and being killed. torchrun gives its ranks 30 s, and then kills them itself."""
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
            env=child_environment() | dict(environment or {}),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines()
    return Ended(code, "\n".join(lines[-TAIL_LINES:]), time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and all that it has started, in whatever session: first asked, then killed.

    torchrun gives its ranks sessions of their own, and ``timeout`` its command a process group.
    """
    alive = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            alive = [first, *first.children(recursive=True)]
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, stubborn = psutil.wait_procs(alive, TERMINATE_S)
    for each in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it left behind when it ended by itself
    process.wait()


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module on so many cards of this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "-m", module, *arguments]
