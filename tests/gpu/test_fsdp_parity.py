"""Engine fsdp on GPUs against Hugging Face and torch's AdamW on the CPU: ``fsdp_parity.py`` on one and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("fsdp_parity.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_engine_fsdp_equals_hugging_face(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(PROGRAM), str(tmp_path), "--platform", "cuda"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
