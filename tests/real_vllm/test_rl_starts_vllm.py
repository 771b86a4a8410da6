"""``megascend rl`` with ``engines: [vllm]`` starts a real vLLM, under torchrun, whose variables the server must not inherit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.vllm_server import ROOT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "VLLM_NO_USAGE_STATS": "1"}


def command(*arguments: object, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "megascend.cli.main", *map(str, arguments)]


def megascend(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, launcher=launcher),
        cwd=ROOT,
        env=ENVIRONMENT,
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


def test_vllm_that_is_killed_is_started_again_and_gets_the_current_weights(tmp_path: Path) -> None:
    python = vllm_python()
    creation = megascend("new-model", tmp_path / "model", "--layers", 2, "--hidden", 128, "--heads", 4, "--context", 64)
    assert creation.returncode == 0, creation.stderr
    settings = {
        "model": tmp_path / "model",
        "output": tmp_path / "run",
        "steps": 8,
        "engines": "[vllm]",
        "vllm.python": python,
        "vllm.options": "[--max-num-seqs=32]",
        "rollout.max_lag": 0,
        "evaluation": "null",
    }
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    metrics = tmp_path / "run" / "metrics.jsonl"

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            command("rl", "examples/rl/sort_digits.yaml", *arguments),
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=output,
            stderr=output,
        )
    try:
        end = time.monotonic() + 300
        while len(rows()) < 2 and run.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        (server,) = (
            process
            for process in psutil.process_iter(["cmdline"])
            # Its watcher has the same arguments, after its own.
            if process.info["cmdline"][1:3] == ["-m", "weightwire.vllm"]
            and str(tmp_path / "model") in process.info["cmdline"]
        )
        server.kill()
        killed_at = len(rows())
        assert run.wait(500) == 0, (tmp_path / "output").read_text()[-3000:]
    finally:
        run.kill()
    text = (tmp_path / "output").read_text()
    assert text.count("is lost, and is asked again") == 1
    assert "answers again, with weights of version 0" in text
    assert (tmp_path / "run.vllm-0.lost.log").exists()
    assert [row["version"] for row in rows()] == list(range(1, 9))
    assert killed_at < 8
    # Without lag, engine and trainer agree if they have the same weights, before and after.
    assert max(row["mismatch"] for row in rows()) < 0.01
