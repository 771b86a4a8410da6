"""``megascend rl``: the example, for a few steps, with an engine in a separate process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "examples/rl/sort_digits.yaml"


def overrides(**values: str | Path) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.mark.nightly  # covered: apps/rl/test_loop.py
@pytest.mark.slow
def test_example_learns_and_resumes(megascend, small_model: Path, tmp_path: Path) -> None:
    settings = {"model": small_model, "output": tmp_path / "run", "evaluation__samples": "1", "checkpoint__every": "2"}
    completed = megascend("rl", EXAMPLE, *overrides(**settings, steps="2"), "--profile", cwd=ROOT)
    assert completed.returncode == 0, completed.stderr
    assert "profile: steps 1 to 2 in" in completed.stdout
    assert "reward" in completed.stdout
    assert "2 steps in" in completed.stdout
    extra = megascend("rl", EXAMPLE, *overrides(**settings, steps="3"), "--resume", "auto", cwd=ROOT)
    assert extra.returncode == 0, extra.stderr
    assert "after step 2" in extra.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["max_lag"] <= 1 for row in rows)
    assert rows[0]["mismatch_max"] < 1e-4
    assert rows[2]["eval_reward"] is not None
    assert (tmp_path / "run" / "metrics.png").stat().st_size > 10_000
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
