"""Programs of tests that end with the test, with all that they have started, however the test ends.

torchrun gives each rank a session of its own, and Ray each of its processes: whoever kills the launcher, or pytest, leaves
them behind. So a watcher stands beside the program. It waits for the end of a pipe that only this process holds, which comes
when this process closes it or is gone, and then kills the program and its descendants.

    python families.py PID         the watcher
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import psutil


@contextlib.contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """``subprocess.Popen(command, **options)``; nothing of it is alive after the block."""
    process = subprocess.Popen(command, text=True, **options)
    watcher = subprocess.Popen([sys.executable, __file__, str(process.pid)], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        watcher.communicate()  # closes the pipe
        process.wait()


def run(command: Sequence[Any], deadline_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program to its end, with its output; raises subprocess.TimeoutExpired."""
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        output, errors = process.communicate(timeout=deadline_s)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants, the launcher last: it would report those that end before it, or start others."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [*reversed(first.children(recursive=True)), first]
    return []


def watch(pid: int) -> None:
    """Kill the process and its descendants when the standard input ends."""
    first = psutil.Process(pid) if psutil.pid_exists(pid) else None
    sys.stdin.read()
    if first is None or not first.is_running():  # its number may be another's by now
        return
    for each in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


if __name__ == "__main__":
    watch(int(sys.argv[1]))
