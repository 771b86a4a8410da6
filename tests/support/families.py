"""Test programs that end, with all their descendants, when the test ends in any way.

torchrun starts each rank in a new session, and Ray each of its processes: killing the launcher, or pytest, would leave them
running. So a watcher process accompanies the program. It waits until a pipe that only this process holds is closed (by this
process or by its end), and then kills the program and its descendants.

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
    """Start ``subprocess.Popen(command, **options)``; all its processes have ended after the block."""
    process = subprocess.Popen(command, text=True, **options)
    watcher = subprocess.Popen([sys.executable, __file__, str(process.pid)], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        watcher.communicate()  # closes the pipe
        process.wait()


def run(command: Sequence[Any], deadline_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program to its end and return its output; raises subprocess.TimeoutExpired."""
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        output, errors = process.communicate(timeout=deadline_s)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def family(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants, the launcher last: it would report or restart ranks that end before it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [*reversed(first.children(recursive=True)), first]
    return []


def watch(pid: int) -> None:
    """Kill the process and its descendants when the standard input ends."""
    first = psutil.Process(pid) if psutil.pid_exists(pid) else None
    sys.stdin.read()
    if first is None or not first.is_running():  # the PID may have been reused
        return
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    watch(int(sys.argv[1]))
