"""Processes that compute a reference: plain torch, transformers and peft on the CPU, whatever the caller runs on.

They are processes of their own because building an mcore-bridge model changes what transformers builds afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megascend.distributed.plain_process import plain_environment

PRELUDE = """
import atexit, gc
gc.disable()  # a short life: imports make half a million objects that stay, and looking through them is a third of it
atexit.register(gc.freeze)
"""
SCRIPT = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run_reference(
    program: Path | str, *arguments: object, stdin: str = "", timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a Python script, or a program given as text, in a process without NPU (real or simulated), network or a second thread.

    Args:
        arguments: ``sys.argv[1:]`` of the program.
        timeout_s: deadline, in seconds.
    """
    command = [SCRIPT, str(program)] if isinstance(program, Path) else [program]
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + command[0], *command[1:], *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        env=plain_environment(),
        timeout=timeout_s,
        check=False,
    )
