"""``megascend rl`` with ``engines: [vllm]`` starts a real vLLM, under torchrun, whose variables the server must not inherit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.vllm_server import ROOT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def megascend(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "megascend.cli.main", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_run_under_torchrun_starts_vllm_pushes_and_ends_it(tmp_path: Path) -> None:
    python = vllm_python()
    creation = megascend("new-model", tmp_path / "model", "--layers", 2, "--hidden", 128, "--heads", 4, "--context", 64)
    assert creation.returncode == 0, creation.stderr
    settings = {
        "model": tmp_path / "model",
        "output": tmp_path / "run",
        "steps": 3,
        "engines": "[vllm]",
        "vllm.python": python,
        "vllm.options": "[--max-num-seqs=32]",
        "evaluation": "null",
    }
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    completed = megascend(
        "rl",
        "examples/rl/sort_digits.yaml",
        *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
        launcher=torchrun,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
    log = tmp_path / "run.vllm-0.log"
    assert f"vLLM 0 starts on cpu; its log: {log}" in completed.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows if "version" in row] == [1, 2, 3]
    assert max(row["pause_s"] for row in rows) > 0
    # The server ends with the run.
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]
