"""``scripts/bench.py rl``: idle shares and speeds of two runs of one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import rl

SCRIPTS = Path(rl.__file__).parents[1]


def test_figures_are_those_of_the_steps_after_the_warm_up() -> None:
    rows = [
        {"seconds": 9.0, "wait_s": 8.0, "sync_s": 1.0, "tokens": 5, "response_tokens": 2.0, "lag": 0.0, "stale": 1},
        {"seconds": 10.0, "wait_s": 0.5, "sync_s": 0.1, "tokens": 30, "response_tokens": 3.0, "lag": 1.0, "stale": 0},
        {"seconds": 13.0, "wait_s": 0.5, "sync_s": 0.3, "tokens": 50, "response_tokens": 5.0, "lag": 0.5, "stale": 2},
    ]
    assert rl.figures(rows, warm_up=1) == {
        "idle": 0.25,
        "sync": pytest.approx(0.1),
        "tokens_per_s": 20.0,
        "step_s": 2.0,
        "response_tokens": 4.0,
        "lag": 0.75,
        "stale": 2,
    }


@pytest.mark.nightly
def test_both_runs_of_the_example_are_measured(tmp_path: Path) -> None:
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    write_checkpoint(tmp_path / "model", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), 0)
    command = [
        sys.executable,
        SCRIPTS / "bench.py",
        "rl",
        "examples/rl/sort_digits.yaml",
        "--steps",
        "3",
        "--warm-up",
        "1",
    ]
    settings = [f"model={tmp_path / 'model'}", "rollout.drop_equal=false", "rollout.max_lag=2"]
    completed = subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting)), "--json", tmp_path / "figures.json"],
        cwd=SCRIPTS.parent,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    figures = json.loads(completed.stdout)
    stored = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert stored.pop("versions")["torch"]
    assert figures == stored
    asynchronous, in_turns = figures["asynchronous"], figures["in turns"]
    # In turns the trainer learns from nothing older than its weights, and waits for it.
    assert in_turns["lag"] == 0 < asynchronous["lag"]
    assert 0 <= asynchronous["idle"] < 1
    assert 0 < in_turns["idle"] < 1
    assert figures["speed-up"] == asynchronous["tokens_per_s"] / in_turns["tokens_per_s"]
