"""Processes that compute a reference: plain torch, transformers and peft on the CPU, whatever the caller runs on.

They are processes of their own because building an mcore-bridge model changes what transformers builds afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        env=reference_environment(),
        timeout=timeout_s,
        check=False,
    )


def reference_environment() -> dict[str, str]:
    """This process's environment and search path, without what makes torch load an NPU, and with one thread."""
    from megascend.simnpu.environment import ACTIVE_VARIABLE, own_paths

    simulated = {str(path) for path in own_paths()} if ACTIVE_VARIABLE in os.environ else set()
    path = [entry for entry in sys.path if entry and entry not in simulated]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop(ACTIVE_VARIABLE, None)
    return environment
