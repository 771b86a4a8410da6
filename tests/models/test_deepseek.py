"""What is particular to DeepSeek-V2's large models, to Kimi-K2 and to Kimi-K2.5."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend.config import Parallel, Recompute
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    case_backend,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from support.exported import exported_tensors
from support.forked_programs import run_forked
from support.model_checks import assert_within

pytestmark = pytest.mark.usefixtures("megatron_imported")

EXPORTS = Path(__file__).with_name("engine_exports.py")
STEPS = 3
GROUPS: dict[str, Any] = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
"""Four of eight experts in two of four groups: Megatron-Core would rank groups by the sum of both their experts."""
LIMITED = (
    Case("single"),
    Case("EP2", 2, Parallel(expert=2)),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    pytest.param(Case("padded", packing=False, micro_batch_tokens=200), marks=pytest.mark.nightly),
    pytest.param(Case("full recompute", recompute=Recompute(granularity="full")), marks=pytest.mark.nightly),
    pytest.param(Case("PP2", 2, Parallel(pipeline=2)), marks=pytest.mark.nightly),
    pytest.param(Case("CP2", 2, Parallel(context=2)), marks=pytest.mark.nightly),
)
AUTO_MAP = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}


@pytest.mark.parametrize("case", LIMITED, ids=lambda case: case.name)
@pytest.mark.nightly_cases("single")  # covered: TP2 + SP
def test_group_limited_routing_equals_hugging_face(case: Case, parity_folder: Path) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, "deepseek_v2", **GROUPS), token_lists()
    reference = hf_reference(parity_folder, checkpoint, tokens, steps=STEPS)
    difference = differences(train_case(case, checkpoint, tokens, steps=STEPS), reference)
    assert_within(difference, loss=1e-5, grad_norm=1e-4)


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        pytest.param("deepseek_v3", Case("single"), marks=pytest.mark.nightly),  # covered: deepseek_v2
        ("deepseek_v2", Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True))),
        pytest.param("glm4_moe_lite", Case("single"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_norms_of_latents_have_the_epsilon_of_hugging_face(arch: str, case: Case, parity_folder: Path) -> None:
    """Make rms_norm_eps large: transformers does not use it for the latents' norms, and Megatron-Core has one for all."""
    # One step: Adam amplifies the rounding of gradients that are near 0.
    checkpoint, tokens = case_checkpoint(parity_folder, arch, rms_norm_eps=0.03), token_lists()
    reference = hf_reference(parity_folder, checkpoint, tokens, steps=1)
    difference = differences(train_case(case, checkpoint, tokens, steps=1), reference)
    assert_within(difference, loss=1e-5, grad_norm=1e-4)


def test_kimi_k2_trains_and_exports_as_deepseek_v3(parity_folder: Path, tmp_path: Path) -> None:
    source = case_checkpoint(parity_folder, "deepseek_v3", n_group=1, topk_group=1)
    kimi, tokens = tmp_path / "kimi", token_lists()
    shutil.copytree(source, kimi)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": AUTO_MAP}
    (kimi / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def on_rank(checkpoint: Path, output: Path) -> tuple[list[float], list[float]]:
        losses, norms = [], []
        with case_backend(Case("single"), checkpoint) as backend:
            for _ in range(STEPS):
                losses.append(backend.forward_backward(causal_samples(tokens)).loss)
                norms.append(backend.optimizer_step().grad_norm)
            backend.export_hf(output)
        return losses, norms

    (as_deepseek,) = run_distributed(on_rank, 1, source, tmp_path / "v3", init=False, timeout_s=120)
    (as_kimi,) = run_distributed(on_rank, 1, kimi, tmp_path / "k2", init=False, timeout_s=120)
    assert as_kimi == as_deepseek
    reference = hf_reference(parity_folder, source, tokens, steps=STEPS)
    assert as_kimi[0] == pytest.approx(reference.losses, abs=1e-5)
    assert as_kimi[1] == pytest.approx(reference.grad_norms, abs=1e-4)
    expected, exported = exported_tensors(tmp_path / "v3"), exported_tensors(tmp_path / "k2")
    assert exported.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(exported[name], tensor)] == []
    config = json.loads((tmp_path / "k2" / "config.json").read_text(encoding="utf-8"))
    assert {name: config[name] for name in ("model_type", "architectures", "auto_map")} == {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": AUTO_MAP,
    }


@pytest.mark.parametrize(
    "engine",
    ["fsdp", pytest.param("single", marks=pytest.mark.nightly), pytest.param("megatron", marks=pytest.mark.nightly)],
)
def test_tower_of_kimi_k25_is_copied_by_exports_alone(engine: str, parity_folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(case_checkpoint(parity_folder, "kimi_k25"), tmp_path / "source")
    text = load_file(source / "model.safetensors")
    tower = {
        "vision_tower.encoder.final_layernorm.weight": torch.randn(32),
        "mm_projector.proj.0.bias": torch.randn(128),
    }
    save_file(text | tower, source / "model.safetensors")
    completed = run_forked(EXPORTS, engine, source, tmp_path)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert set(json.loads(completed.stdout.splitlines()[-1])["keep"]) == text.keys()
    exported = exported_tensors(tmp_path / "keep")
    assert exported.keys() == (text | tower).keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in (text | tower).items())
