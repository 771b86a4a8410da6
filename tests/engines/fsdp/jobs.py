"""Runner of a script's functions, one after the other, in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.forked_programs import run_forked

Job = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A function's name and its arguments."""


def run_jobs(script: Path, folder: Path, *jobs: Job) -> list[Any]:
    """Run jobs in the script, and return their results.

    Args:
        script: takes a file of jobs and one for their results.
        folder: for both files.
    """
    torch.save(list(jobs), folder / "job")
    completed = run_forked(script, folder / "job", folder / "result", timeout_s=400)
    assert completed.returncode == 0, completed.stderr[-6000:]
    return torch.load(folder / "result", weights_only=False)
