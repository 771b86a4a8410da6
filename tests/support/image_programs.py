"""Run ``tests/models/image_steps.py``, which trains on images without Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.forked_programs import run_launched

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "models" / "image_steps.py"


def run_program(processes: int, folder: Path, **job: Any) -> dict[str, Any]:
    """Run the program on a number of ranks, and return its result."""
    job = {name: str(value) if isinstance(value, Path) else value for name, value in job.items()}
    result = folder / "result.pt"
    argument = json.dumps(job | {"result": str(result)})
    completed = run_launched(PROGRAM, processes, argument)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return torch.load(result)
