"""A training step of verl's waits for the device once, however many micro batches it has."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import python

HERE = Path(__file__).parent
pytestmark = pytest.mark.nightly

NORM = "_local_scalar_dense at optimizer/clip_grads.py"
CASES = ("sft_loss", "another", "sft_loss, first trained")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """step_waits.py's report."""
    found = tmp_path_factory.mktemp("waits")
    made = python(["-m", "megascend", "new-model", "model", "--hidden", "64", "--layers", "2"], found)
    assert made.returncode == 0, made.stderr
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 60000))}
    done = python([str(HERE / "step_waits.py"), str(found / "model"), "steps.json"], found, **meeting)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((found / "steps.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_the_norm_alone(steps: dict[str, Any], case: str) -> None:
    one, five = steps[f"{case}, 64"], steps[f"{case}, 12"]
    assert (one["micro batches"], five["micro batches"]) == (1, 5)
    for step in (one, five):
        assert [(where.rpartition(":")[0], count) for where, count in step["waits"].items()] == [(NORM, 1)]


def test_verls_sft_loss_needs_the_logits_once(steps: dict[str, Any]) -> None:
    """And twice where it is no cross entropy of each sequence by itself, or another function."""
    passes = {case: steps[f"{case}, 12"]["projections"] for case in CASES}
    assert passes == {"sft_loss": 5, "another": 10, "sft_loss, first trained": 10}


@pytest.mark.parametrize("tokens", [64, 12])
def test_and_has_the_same_numbers(steps: dict[str, Any], tokens: int) -> None:
    known, unknown = steps[f"sft_loss, {tokens}"], steps[f"another, {tokens}"]
    for name in ("loss", "norm"):
        assert known[name] == pytest.approx(unknown[name], rel=1e-6)
    for found, expected in zip(known["log_probs"], unknown["log_probs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_changed_sft_loss_is_an_error(steps: dict[str, Any]) -> None:
    assert "verl's sft_loss has another gradient" in steps["changed"]
