"""Nemotron-H: kinds of layers, steps of any size, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
from packaging.version import Version
from safetensors.torch import load_file, save_file

from megascend.config import Parallel
from megascend.errors import MissingDependencyError, VersionError
from megascend.models import architecture_named
from megascend.models.base import StateSpace
from megascend.models.checkpoint_files.exported import prediction_tensors
from megascend.models.checkpoint_files.info import shape_of
from megascend.models.families.nemotron import step_limits
from megascend.models.memory.activations import LayerKind, state_space_bytes
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    bounds,
    case_backend,
    case_checkpoint,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from megascend.testing.tiny_models import tiny_config
from support.forked_programs import run_forked
from support.model_checks import (
    assert_sampled_without_cache,
    assert_within,
    saved_bytes,
)

pytestmark = pytest.mark.usefixtures("megatron_imported")

ON_STACK = Version(metadata.version("megatron-core")) >= Version("0.19")
needs_stack = pytest.mark.skipif(not ON_STACK, reason="state spaces need megatron-core 0.19 (stack 0.19)")
ENGINES = Path(__file__).with_name("engine_steps.py")
NAMES = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NANO = {"moe_latent_size": None}
"""Experts of the hidden size, as in Nemotron 3 Nano."""
DENSE = {"layers_block_type": [NAMES[symbol] for symbol in "M-M*-M"], "moe_latent_size": None}
"""A model without experts, as Nemotron-H and Nemotron Nano 2."""


def config(**overrides: Any) -> dict[str, Any]:
    return tiny_config("nemotron_h", **overrides)


def normalised(**settings: Any) -> dict[str, Any]:
    raw = {name: value for name, value in config().items() if name not in ("layers_block_type", "num_hidden_layers")}
    return architecture_named("nemotron_h").normalise(raw | settings)


@pytest.mark.skipif(ON_STACK, reason="stack 0.19 has state spaces")
def test_older_stack_is_refused_by_name(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "nemotron_h")

    def on_rank() -> str:
        with pytest.raises(VersionError) as caught:
            case_backend(Case("single"), checkpoint)
        return str(caught.value)

    (message,) = run_distributed(on_rank, 1, init=False, timeout_s=60)
    assert message.startswith("nemotron_h: Megatron-Core has its layers from 0.19 on, and ")
    assert "megascend[stack-0-19]" in message


@pytest.mark.parametrize(
    "settings",
    [
        {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5},
        {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]},
        {"layers_block_type": [NAMES[symbol] for symbol in "ME*-M"]},
    ],
)
def test_layers_are_read_as_transformers_reads_them(settings: dict[str, Any]) -> None:
    from transformers import NemotronHConfig

    text = normalised(**settings)
    assert text["layer_types"] == [NAMES[symbol] for symbol in "ME*-M"]
    assert text["num_hidden_layers"] == 5
    assert NemotronHConfig(**settings).layer_types == text["layer_types"]
    assert architecture_named("nemotron_h").megatron_settings(text)["hybrid_layer_pattern"] == "ME*-M"


def test_number_of_experts_of_a_model_without_experts_is_ignored() -> None:
    text = normalised(hybrid_override_pattern="M-*", n_routed_experts=8)
    assert shape_of(text).num_experts is None
    assert architecture_named("nemotron_h").unsupported(text) == []
    assert architecture_named("nemotron_h").megatron_settings(text)["num_moe_experts"] is None


def test_limits_of_steps_are_read_in_both_spellings() -> None:
    assert step_limits({}) == (0.0, math.inf)
    assert step_limits({"time_step_limit": [0.5, {"__float__": "Infinity"}]}) == (0.5, math.inf)
    assert step_limits({"time_step_limit": (0.0, 0.1)}) == (0.0, 0.1)


def test_first_layer_is_no_head_for_multi_token_prediction() -> None:
    settings = {"model_type": "nemotron_h", "num_nextn_predict_layers": 1, "layers_block_type": [NAMES["M"]] * 3}
    names = ["backbone.layers.0.norm.weight", "backbone.layers.2.norm.weight", "mtp.layers.0.norm.weight"]
    assert prediction_tensors(settings, names) == ["mtp.layers.0.norm.weight"]


def test_missing_kernels_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from megascend.engines.megatron import build

    build.check_packages(architecture_named("nemotron_h"))
    for missing in ("mamba_ssm", "causal_conv1d"):
        monkeypatch.setattr(build, "is_installed", lambda name, missing=missing: name != missing)
        with pytest.raises(MissingDependencyError, match=r"nemotron_h: .* pip install 'megascend\[state-spaces\]'"):
            build.check_packages(architecture_named("nemotron_h"))


@needs_stack
@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        (Case("Nano"), NANO),
        (Case("dense"), DENSE),
        pytest.param(Case("Nano, TP2 + SP", 2, Parallel(tensor=2, sequence=True)), NANO, marks=pytest.mark.nightly),
        pytest.param(Case("Nano, EP2", 2, Parallel(expert=2)), NANO, marks=pytest.mark.nightly),
        (Case("dense, TP2", 2, Parallel(tensor=2)), DENSE),
        (Case("dense, PP2", 2, Parallel(pipeline=2)), DENSE),
        # differs: HybridModel: layers divided over virtual stages
        pytest.param(
            Case("dense, VPP2", 2, Parallel(pipeline=2, virtual_pipeline=3)),
            DENSE,
            marks=[pytest.mark.nightly, pytest.mark.difference],
        ),
        (Case("epsilon"), {"layer_norm_epsilon": 0.05}),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_other_members_equal_transformers(case: Case, overrides: dict[str, Any], parity_folder: Path) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, "nemotron_h", **overrides), token_lists()
    trained = train_case(case, checkpoint, tokens, steps=3)
    # Models without experts amplify rounding a hundredfold a step. From the exact trajectory, ours may be twice as far as
    # transformers' own fp32 is; from that one, both errors would add up.
    reference = hf_reference(parity_folder, checkpoint, tokens, 3, dtype="float64")
    difference = differences(trained, reference)
    loss_bound, norm_bound = bounds(replace(case, arch="nemotron_h"), parity_folder, checkpoint, tokens, 3)
    assert_within(difference, loss=loss_bound, grad_norm=norm_bound)
    if difference.logits is not None:
        assert difference.logits <= 2e-5, difference


@pytest.fixture
def small_steps(parity_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint with steps far below 0.001, and the same with that as the limit that transformers applies."""
    source, folders = case_checkpoint(parity_folder, "nemotron_h"), []
    for smallest in (1e-30, 0.001):
        folder = tmp_path / f"steps-{smallest}"
        shutil.copytree(source, folder)
        tensors = load_file(folder / "model.safetensors")
        changed = {name: x - 9 if name.endswith("dt_bias") else x for name, x in tensors.items()}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(settings | {"time_step_min": smallest}), encoding="utf-8")
        folders.append(folder)
    return folders[0], folders[1]


@needs_stack
def test_steps_have_no_limit_but_the_configured_one(small_steps: tuple[Path, Path], parity_folder: Path) -> None:
    tokens = token_lists()
    free, limited = (hf_reference(parity_folder, checkpoint, tokens, steps=2) for checkpoint in small_steps)
    run = train_case(Case("small steps"), small_steps[1], tokens, steps=2)
    difference = differences(run, free)
    assert_within(difference, loss=1e-5, grad_norm=1e-4)
    # transformers 5.24 takes time_step_min for the limit (huggingface/transformers#48989).
    assert differences(run, limited).grad_norm > 1e-2


@pytest.mark.nightly_cases("fsdp")  # covered: single
@pytest.mark.parametrize("engine", ["fsdp", "single"])
def test_steps_have_no_limit_without_megatron(
    engine: str, small_steps: tuple[Path, Path], parity_folder: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    completed = run_forked(ENGINES, engine, small_steps[1], 2, result, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-3000:]
    run = TrainingCurve(**json.loads(result.read_text(encoding="utf-8")), logits=[])
    difference = differences(run, hf_reference(parity_folder, small_steps[0], token_lists(), steps=2))
    assert_within(difference, loss=1e-5, grad_norm=1e-4)


@needs_stack
def test_sampler_recomputes_the_sequence_and_reports_the_reason(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "nemotron_h")
    assert_sampled_without_cache(checkpoint, "a layer whose attention is MambaLayer")


@needs_stack
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_space_saves_the_counted_bytes(parity_folder: Path, precision: Literal["fp32", "bf16"]) -> None:
    lengths = (256, 192)
    checkpoint = case_checkpoint(parity_folder, "nemotron_h")
    case = Case("saved", precision=precision, micro_batch_tokens=4096)

    def on_rank() -> int:
        with case_backend(case, checkpoint) as backend:
            return saved_bytes(backend, lambda chunk: chunk.decoder.layers[0].mixer, lengths)

    (measured,) = run_distributed(on_rank, 1, init=False, timeout_s=60)
    space = StateSpace.from_config(normalised(layers_block_type=config()["layers_block_type"]))
    assert space is not None
    width = {"bf16": 2, "fp32": 4}[precision]
    kind = LayerKind(fused=False, bytes=width, packed=True, frozen=False, rank=0, longest=max(lengths))
    expected = state_space_bytes(space, kind) + width * 64  # and the projection's input
    assert sum(lengths) * expected == pytest.approx(measured, rel=0.03)
