"""The speed figures come from a script that works: its small version, here without looking at the times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_the_small_bench_runs_and_its_ways_agree(engine):
    done = subprocess.run(
        [sys.executable, "scripts/bench_multi_lora.py", "--tiny", "--platform", "cpu", "--engine", engine],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ways = [line.split()[2] for line in done.stdout.splitlines() if line.split()[:1] == ["3"]]
    assert ways == ["(a)", "(b)", "(c)"]
    assert "numbers agree" in done.stdout
