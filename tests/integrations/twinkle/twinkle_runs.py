"""Commands of the tests that start twinkle's programs."""

from __future__ import annotations

import sys
from pathlib import Path

from support import integration_programs

FOLDER = Path(__file__).parent


def run(command: list[str], folder: Path) -> str:
    """Run a program that must succeed, offline; return its output."""
    return integration_programs.run(command, folder, errors=True, HF_HUB_OFFLINE="1")


def launched(ranks: int, *arguments: str) -> list[str]:
    """Build the command of a twinkle program on some ranks, as in docs/integrations/twinkle.md."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--standalone",
    ]
    return [sys.executable, *(torchrun if ranks > 1 else []), "-m", "megascend.integrations.twinkle", *arguments]
