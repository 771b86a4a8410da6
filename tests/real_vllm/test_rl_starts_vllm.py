"""``megascend rl`` with ``engines: [vllm]`` starts a real vLLM, under torchrun, whose variables the server must not inherit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.forked_programs import environment, run_command
from support.vllm_server import ROOT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = ("--layers", 2, "--hidden", 128, "--heads", 4, "--context", 64)
    creation = run_command("new-model", tmp_path / "model", *sizes)
    assert creation.returncode == 0, creation.stderr
    return tmp_path / "model"


def start(model: Path, output: Path, *launcher: str, **changes: Any) -> subprocess.Popen[bytes]:
    """Start the example with a vLLM; its messages go to ``output`` with the suffix ``.txt``."""
    settings = {
        "model": model,
        "output": output,
        "engines": "[vllm]",
        "vllm.python": vllm_python(),
        "vllm.options": "[--max-num-seqs=32]",
        "evaluation": "null",
    } | changes
    overrides = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        *launcher,
        "-m",
        "megascend.apps.cli.main",
        "rl",
        "examples/rl/sort_digits.yaml",
        *overrides,
    ]
    variables = environment(VLLM_NO_USAGE_STATS="1")
    with output.with_suffix(".txt").open("wb") as messages:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=messages, stderr=messages)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes with a path below ``folder`` among their arguments."""
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if any(str(folder) in part for part in process.info["cmdline"] or ())]


def rows(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def test_run_under_torchrun_starts_vllm_pushes_and_ends_it(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = start(model, output, *TORCHRUN, steps=3)
    try:
        code = run.wait(500)
    finally:
        run.kill()
    messages = output.with_suffix(".txt").read_text(encoding="utf-8")
    assert code == 0, messages[-5000:]
    assert f"vLLM 0 starts on cpu; its log: {tmp_path / 'run.vllm-0.log'}" in messages
    assert [row["version"] for row in rows(output) if "version" in row] == [1, 2, 3]
    assert max(row["pause_s"] for row in rows(output)) > 0
    # The server ends with the run.
    assert processes_of(tmp_path) == []


def test_vllm_that_is_killed_is_started_again_and_gets_the_current_weights(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = start(model, output, steps=8, **{"rollout.max_lag": 0})
    try:
        end = time.monotonic() + 300
        while len(rows(output)) < 2 and run.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        # Its watcher has the same arguments, after its own.
        is_server = ["-m", "weightwire.vllm"]
        (server,) = (process for process in processes_of(model) if process.info["cmdline"][1:3] == is_server)
        server.kill()
        killed_at = len(rows(output))
        code = run.wait(500)
    finally:
        run.kill()
    messages = output.with_suffix(".txt").read_text(encoding="utf-8")
    assert code == 0, messages[-3000:]
    assert messages.count("is lost, and is asked again") == 1
    assert "answers again, with weights of version 0" in messages
    assert (tmp_path / "run.vllm-0.lost.log").exists()
    assert [row["version"] for row in rows(output)] == list(range(1, 9))
    assert killed_at < 8
    # Without lag, engine and trainer agree if they have the same weights, before and after.
    assert max(row["mismatch"] for row in rows(output)) < 0.01
