"""Engine features beyond verl's SFT trainer: LoRA, entropy, policy loss, weights, disabled adapter, checkpoints, refusals."""

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

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run engine_calls.py, and transformers' scores of the same sequences."""
    directory = tmp_path_factory.mktemp("engine")
    new_model = python(["-m", "megascend", "new-model", "model", "--hidden", "64", "--layers", "2"], directory)
    assert new_model.returncode == 0, new_model.stderr
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    completed = python([str(FOLDER / "engine_calls.py"), str(directory / "model"), "calls.json"], directory, **meeting)
    assert completed.returncode == 0, completed.stderr[-4000:]
    (directory / "ids.json").write_text(json.dumps(json.loads((directory / "calls.json").read_text())["ids"]))
    arguments = ["model", "ids.json", "scores.json"]
    completed = python([str(FOLDER / "reference_scores.py"), *arguments], directory, VERL_ENGINE_VENDOR="")
    assert completed.returncode == 0, completed.stderr[-4000:]
    return directory


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "calls.json").read_text())


@pytest.fixture(scope="module")
def scores(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "scores.json").read_text())


@pytest.mark.parametrize("name", ["log_probs", "entropy"])
def test_scores_are_those_of_transformers_at_verls_places(
    calls: dict[str, Any], scores: dict[str, Any], name: str
) -> None:
    for row, expected in zip(calls["before"][name], scores[name], strict=True):
        assert row == pytest.approx(expected, abs=TOLERANCE)


def test_a_policy_loss_with_entropy_is_verls_number(calls: dict[str, Any], scores: dict[str, Any]) -> None:
    """Use two micro batches, which have all four sequences."""
    total, tokens = 0.0, 0
    for logprobs, entropy, mask in zip(scores["log_probs"], scores["entropy"], calls["masks"], strict=True):
        for position, trained in enumerate(mask[1:]):
            total -= trained * (logprobs[position] - 0.1 * entropy[position])
        tokens += sum(mask)
    assert (calls["micro batches"], calls["seen"]) == (2, 4)
    assert calls["losses"][0] == pytest.approx(total / tokens, abs=TOLERANCE)


def test_the_learning_rate_is_that_of_verls_scheduler(calls: dict[str, Any]) -> None:
    """Warm up from 0: the first step changes nothing, and a loaded checkpoint continues the schedule."""
    assert calls["rates"] == pytest.approx([0.0025, 0.005, 0.0075])
    assert calls["next rate"] == pytest.approx(0.01)
    assert calls["losses"][1] == calls["losses"][0]
    assert calls["losses"][2] < calls["losses"][1]


def test_the_adapter_is_trained_switched_off_and_resumed(calls: dict[str, Any]) -> None:
    assert calls["moved"] > 0.01
    assert calls["base"] == 0.0
    assert calls["fresh"] == 0.0
    assert calls["loaded"] == 0.0


def test_weights_have_hugging_faces_names_and_values(folder: Path, calls: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    files = [load_file(path) for path in (folder / "model").glob("*.safetensors")]
    expected = {name: float(tensor.double().sum()) for tensors in files for name, tensor in tensors.items()}
    assert calls["weights"] == expected


def test_adapter_weights_have_peft_names_and_shapes(calls: dict[str, Any]) -> None:
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"]
    expected = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{factor}.weight"
        for layer in range(2)
        for name in layers
        for factor in "AB"
    }
    assert set(calls["adapter"]) == expected
    assert calls["adapter"]["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == [4, 64]
    assert (calls["config"]["r"], calls["config"]["lora_alpha"]) == ("4", "8")


def test_unsupported_batch_options_are_named(calls: dict[str, Any]) -> None:
    for name in ("temperature", "calculate_sum_pi_squared"):
        assert f"{name}=" in calls["errors"][name]
