"""Run ``tests/models/picture_steps.py``, which trains on pictures without Megatron."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from megascend.distributed.launch import plain_environment

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "models" / "picture_steps.py"


def run_program(processes: int, folder: Path, **job: Any) -> dict[str, Any]:
    """Run the program on a number of ranks, and return its result."""
    job = {name: str(value) if isinstance(value, Path) else value for name, value in job.items()}
    result = folder / "result.pt"
    command = [sys.executable, str(PROGRAM), json.dumps(job | {"result": str(result)})]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = plain_environment() | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return torch.load(result)
