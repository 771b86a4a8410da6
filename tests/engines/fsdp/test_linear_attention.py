"""Models of linear attention on the engines without Megatron: samples apart to the bit, training against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_jobs
from safetensors.torch import load_file

from megascend import Batching, Recompute
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    bounds,
    case_checkpoint,
    differences,
    hf_reference,
    token_lists,
)
from support.stacks import FIRST_STACK

pytestmark = pytest.mark.skipif(not FIRST_STACK, reason="older versions of transformers have other modules")

RUNS = Path(__file__).with_name("linear_attention_runs.py")
STEPS = 2
ARCHS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
CONDITIONED = {"rms_norm_eps": 1e-2}
"""The gated norm divides outputs of linear attention by their size, which is near 0 for some tokens of a tiny model."""
PACKED, PADDED = Batching(micro_batch_tokens=64), Batching(packing=False, micro_batch_tokens=200)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp, DP2": ("fsdp", 2, {"batching": PACKED}),
    "fsdp, recomputed": ("fsdp", 1, {"batching": PACKED, "recompute": Recompute(granularity="full")}),
    "single": ("single", 1, {"batching": PADDED}),
}


def checkpoint_of(arch: str, parity_folder: Path) -> Path:
    return case_checkpoint(parity_folder, arch, **CONDITIONED)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.nightly_cases("qwen3_5_text", "qwen3_5_moe_text")  # covered: qwen3_next
@pytest.mark.parametrize("arch", ARCHS)
def test_training_and_export_equal_transformers_without_packing(arch: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint, tokens = checkpoint_of(arch, parity_folder), token_lists()
    layouts = LAYOUTS if arch == "qwen3_next" else {name: LAYOUTS[name] for name in ("fsdp, DP2", "single")}
    jobs = [
        ("trained", (engine, ranks, str(checkpoint), STEPS, str(tmp_path / name)), options)
        for name, (engine, ranks, options) in layouts.items()
    ]
    results = run_jobs(RUNS, tmp_path, *jobs)
    reference = hf_reference(parity_folder, checkpoint, tokens, steps=STEPS, weights=True)
    loss_bound, norm_bound = bounds(Case(arch, arch=arch), parity_folder, checkpoint, tokens, STEPS)
    source = tensors(checkpoint)
    for name, (losses, norms, self_check) in zip(layouts, results, strict=True):
        difference = differences(
            TrainingCurve(losses, norms, []), TrainingCurve(reference.losses, reference.grad_norms, [])
        )
        print(arch, name, difference, loss_bound, norm_bound)
        assert self_check == "agrees"
        assert difference.loss <= loss_bound, (name, difference)
        assert difference.grad_norm <= norm_bound, (name, difference)
        exported = tensors(tmp_path / name)
        assert exported.keys() == source.keys()
        # Adam moves a weight whose gradient is near 0 by up to a learning rate either way.
        distances = {key: float((exported[key] - tensor).abs().mean()) for key, tensor in reference.weights.items()}
        assert max(distances.values()) < 2e-5, (name, max(distances, key=distances.__getitem__))
        assert [key for key, tensor in source.items() if torch.equal(exported[key], tensor)] == []


@pytest.mark.nightly_cases("qwen3_5_text", "qwen3_5_moe_text")  # covered: qwen3_next
@pytest.mark.parametrize("arch", ARCHS)
def test_samples_of_a_micro_batch_do_not_see_each_other(arch: str, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = str(checkpoint_of(arch, parity_folder))
    layouts = {"packed": ("fsdp", True), "padded": ("fsdp", False), "single": ("single", False)}
    jobs = [("isolated", (engine, checkpoint), {"packing": packing}) for engine, packing in layouts.values()]
    *results, merged_samples = run_jobs(
        RUNS, tmp_path, *jobs, ("isolated", ("fsdp", checkpoint), {"packing": True, "borders": False})
    )
    for layout, changes in zip(layouts, results, strict=True):
        assert len(changes) == 6
        for change, distances in changes.items():
            # transformers' experts sum gradients over the tokens of all samples, in an order that the routing decides.
            experts = [name for name in distances if layout == "single" and ".experts." in name]
            assert distances.keys() == set(experts), (layout, change, distances)
            assert all(distances[name] < 1e-6 for name in experts), (layout, change, distances)
    assert "log-probabilities 2" in merged_samples["0: other tokens"]  # the comparison shows it where it happens


def test_kernels_of_other_devices_are_not_called_by_the_self_check_and_in_fp32(
    parity_folder: Path, tmp_path: Path
) -> None:
    """Kernels do not run on the CPU, where the self-check does, and multiply in TF32."""
    checkpoint = str(checkpoint_of("qwen3_5_moe_text", parity_folder))
    options = {"batching": Batching(micro_batch_tokens=256)}
    jobs = [  # with a cache each: a verdict that the first has kept is not checked again
        (
            "checked_beside_kernels",
            ("fsdp", checkpoint, str(tmp_path / precision), packages),
            options | {"precision": precision},
        )
        for packages, precision in ((["fla"], "fp32"), (["fla", "causal_conv1d"], "bf16"))
    ]
    (_, in_fp32), (verdicts, in_bf16) = run_jobs(RUNS, tmp_path, *jobs)
    assert in_fp32 == "no kernel was called"
    assert in_bf16 == "a kernel was called on the CPU"
    assert [(verdict.status, verdict.not_shown) for verdict in verdicts] == [("agrees", "")]


def test_packing_without_kernels_is_refused_with_their_packages(parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = str(checkpoint_of("qwen3_5_text", parity_folder))
    jobs = [("refusal", (checkpoint,), {"packing": packing}) for packing in (True, False)]
    packed, padded = run_jobs(RUNS, tmp_path, *jobs)
    assert "(Qwen3_5GatedDeltaNet in Qwen3_5DecoderLayer), where packed samples affect each other" in packed
    assert packed.endswith(
        "install flash-linear-attention, whose functions keep them apart, or set batching.packing: false"
    )
    assert padded == "agrees"
