"""Commands of the tests that start twinkle's programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
DEADLINE_S = 600


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": programs, "HF_HUB_OFFLINE": "1"}


def run(command: list[str], folder: Path) -> str:
    """Run a program that must succeed; return its output."""
    completed = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    return completed.stdout + completed.stderr


def launched(ranks: int, *arguments: str) -> list[str]:
    """Build the command of a twinkle program on some ranks, as in docs/integrations/twinkle.md."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--standalone",
    ]
    return [sys.executable, *(torchrun if ranks > 1 else []), "-m", "megascend.integrations.twinkle", *arguments]
