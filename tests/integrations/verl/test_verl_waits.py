"""A training step of verl waits for the device once, for any number of micro batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from torch.distributed.elastic.utils.distributed import get_free_port
from verl_runs import python

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.nightly

NORM = "_local_scalar_dense at optimizer/clip_grads.py"
CASES = ("sft_loss", "another", "sft_loss, first trained")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run step_waits.py."""
    directory = tmp_path_factory.mktemp("waits")
    new_model = python(["-m", "megascend", "new-model", "model", "--hidden", "64", "--layers", "2"], directory)
    assert new_model.returncode == 0, new_model.stderr
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    completed = python([str(FOLDER / "step_waits.py"), str(directory / "model"), "steps.json"], directory, **meeting)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads((directory / "steps.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_host_waits_only_for_the_gradient_norm(steps: dict[str, Any], case: str) -> None:
    single_batch, five_batches = steps[f"{case}, 64"], steps[f"{case}, 12"]
    assert (single_batch["micro batches"], five_batches["micro batches"]) == (1, 5)
    for step in (single_batch, five_batches):
        assert [(location.rpartition(":")[0], count) for location, count in step["waits"].items()] == [(NORM, 1)]


def test_verls_sft_loss_needs_the_logits_once(steps: dict[str, Any]) -> None:
    """Compute logits twice if the loss is not a cross entropy of each sequence, or another function."""
    passes = {case: steps[f"{case}, 12"]["projections"] for case in CASES}
    assert passes == {"sft_loss": 5, "another": 10, "sft_loss, first trained": 10}


def test_a_changed_sft_loss_is_an_error(steps: dict[str, Any]) -> None:
    assert "verl's sft_loss has another gradient" in steps["changed"]
