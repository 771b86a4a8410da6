"""Programs of a section: started with a deadline, and ended with all their descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megascend.runtime.distributed.launch import child_environment
from npu_acceptance.plan import Settings

TERMINATE_S = 40.0
"""Between SIGTERM and SIGKILL. torchrun gives its ranks 30 s, and then kills them itself."""
TAIL_LINES = 60


@dataclass(frozen=True)
class ProgramResult:
    """Exit code and output of a program.

    Attributes:
        code: its exit code; None if it exceeded its deadline.
        tail: the end of its output.
    """

    code: int | None
    tail: str
    seconds: float

    def problem(self, deadline_s: float) -> str:
        """Describe the failure; empty if the program ended with 0."""
        if self.code is None:
            return f"not done after {deadline_s:.0f} s"
        return f"exit code {self.code}" if self.code else ""

    @property
    def last_error(self) -> str:
        """Error line of the first rank that raised, or the exit code."""
        errors = [line.split("]: ", 1)[-1] for line in self.tail.splitlines() if "Error: " in line or "Error(" in line]
        return errors[0] if errors else f"exit code {self.code}"


def run(
    command: Sequence[str], log: Path, deadline_s: float, environment: Mapping[str, str] | None = None
) -> ProgramResult:
    """Run ``command`` with its output in ``log``; all its processes have ended when this returns."""
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
    return ProgramResult(code, "\n".join(lines[-TAIL_LINES:]), time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and all its descendants, in any session: SIGTERM first, then SIGKILL.

    torchrun starts each rank in a new session, and ``timeout`` its command in a new process group.
    """
    alive = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            alive = [first, *first.children(recursive=True)]
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, stubborn = psutil.wait_procs(alive, TERMINATE_S)
    for child in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # descendants that outlived it
    process.wait()


def run_ranks(
    settings: Settings, ranks: int, section: str, job: dict[str, Any], deadline_s: float, **environment: str
) -> ProgramResult:
    """Run a section's module as a program on ``ranks`` cards; its argument names a file with ``job`` as JSON."""
    name = f"{section}-{job.get('name', ranks)}".replace(" ", "_")
    path = settings.folder / "jobs" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(job), encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "-m", f"npu_acceptance.{section}", str(path)]
    outcome = run(command, settings.folder / "logs" / f"{name}.log", deadline_s, environment)
    if outcome.code != 0:
        print(f"== end of the output of {name}\n{outcome.tail}", flush=True)
    return outcome


def read_job() -> dict[str, Any]:
    """Return the job of this rank, from the file that the command line names."""
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
