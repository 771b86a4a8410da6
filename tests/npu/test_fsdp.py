"""The FSDP engine on the simulated device against Hugging Face and torch AdamW, in processes without Megatron and MindSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend import Fsdp, Lora, Parallel, Recompute
from megascend.testing.parity import TrainingCurve, case_checkpoint, differences, hf_reference, token_lists
from support.ascend_packages import ON_ADAPTOR
from support.lora_parity import adapter_differences, peft_reference, share_of
from support.model_checks import assert_within

RANKS = Path(__file__).with_name("fsdp_ranks.py")
RECOMPUTED = Recompute(granularity="full")
SP2 = Parallel(context=2, context_algorithm="ulysses")

Layout = tuple[str, str, dict[str, Any], int, dict[str, Any], float, float]

LAYOUTS: list[Layout] = [
    ("MoE DP2, 2 layers, recomputed", "qwen3_moe", {"num_hidden_layers": 2}, 2, {"recompute": RECOMPUTED}, 1e-5, 1e-4),
]
MORE: list[Layout] = [
    ("DP2, 2 layers", "qwen3", {"num_hidden_layers": 2}, 2, {}, 1e-5, 1e-4),  # covered: MoE DP2, 2 layers
    ("DP2", "qwen3", {}, 2, {}, 1e-5, 1e-4),
    ("MoE DP2, recomputed", "qwen3_moe", {}, 2, {"recompute": RECOMPUTED}, 1e-5, 1e-4),
    ("HSDP 2x2, tied", "qwen3", {"tie_word_embeddings": True}, 4, {"fsdp": Fsdp(replicate=2)}, 1e-5, 1e-4),
    ("DP2, offload, recomputed", "qwen3", {}, 2, {"fsdp": Fsdp(offload=True), "recompute": RECOMPUTED}, 1e-5, 1e-4),
    ("SP2", "qwen3", {}, 2, {"parallel": SP2}, 1e-5, 1e-4),
    ("MoE on 3 ranks, 4 experts", "qwen3_moe", {}, 3, {}, 1e-5, 1e-4),
    ("DP2, selectively recomputed", "qwen3", {}, 2, {"recompute": Recompute(granularity="selective")}, 1e-5, 1e-4),
    ("bf16 DP2", "qwen3", {}, 2, {"precision": "bf16"}, 2e-2, 0.1),
    ("fp16 DP2", "qwen3", {}, 2, {"precision": "fp16"}, 1e-2, 0.1),
    ("MoE bf16 DP2, recomputed", "qwen3_moe", {}, 2, {"precision": "bf16", "recompute": RECOMPUTED}, 0.15, 1.0),
]


def on_the_device(run_python: Any, folder: Path, *jobs: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Run jobs on the device; return their results and all calls of fused operators."""
    torch.save(list(jobs), folder / "job")
    logs = folder / "calls"
    run_python(RANKS, folder / "job", folder / "result", huggingface=True, SIMNPU_LOG=str(logs))
    calls = [json.loads(line) for path in sorted(logs.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return torch.load(folder / "result", weights_only=False), calls


def compare_with_hugging_face(
    layouts: list[Layout], run_python: Any, parity_folder: Path, tmp_path: Path
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Train ten steps of each layout and compare with Hugging Face; print the deviations."""
    checkpoints = [case_checkpoint(parity_folder, arch, **overrides) for _, arch, overrides, *_ in layouts]
    jobs = [
        ("trajectory", (str(path), world_size), options | {"platform": "npu"})
        for path, (_, _, _, world_size, options, _, _) in zip(checkpoints, layouts, strict=True)
    ]
    (fails, *results), calls = on_the_device(run_python, tmp_path, ("casts_fail", (), {}), *jobs)
    assert fails, "casts of DTensors should be errors in this process"
    problems = []
    for (name, *_, loss, norm), path, ranks in zip(layouts, checkpoints, results, strict=True):
        reference = hf_reference(parity_folder, path, token_lists())
        deviation = differences(
            TrainingCurve(ranks["losses"], ranks["norms"], []),
            TrainingCurve(reference.losses, reference.grad_norms, []),
        )
        print(f"{name}: loss {deviation.loss:.1e}, norm {deviation.grad_norm:.1e}")
        if not (deviation.loss <= loss and deviation.grad_norm <= norm):
            problems.append((name, deviation))
    assert not problems
    return results, calls


def test_trajectories_equal_hugging_face(run_python, parity_folder, tmp_path):
    """Packed samples take one attention call with their ends and the compressed triangle; Megatron is not imported."""
    results, calls = compare_with_hugging_face(LAYOUTS, run_python, parity_folder, tmp_path)
    # peft imports any Transformer Engine that it finds, and TransformerEngineNPU's stand-in consists of the reference.
    by_peft = ("transformer_engine", "megascend.reference.te") if ON_ADAPTOR else ()
    assert [name for ranks in results for name in ranks["foreign"] if not name.startswith(by_peft)] == []
    attention = [call["arguments"] for call in calls if call["name"] == "npu_fusion_attention"]
    assert attention
    for call in attention:
        assert call["input_layout"] in ("TND", "BSND")
        assert call["atten_mask"]["shape"] == [2048, 2048]
        assert (call["sparse_mode"], call["next_tockens"]) == (2, 0)
    packed = [call for call in attention if call["input_layout"] == "TND"]
    assert packed
    assert all(call["actual_seq_qlen"] == call["actual_seq_kvlen"] for call in packed)
    assert any(len(call["actual_seq_qlen"]) > 1 for call in packed)
    products = [call["arguments"]["group_type"] for call in calls if call["name"] == "npu_grouped_matmul"]
    assert set(products) == {0, 2}  # forward and gradient of rows; gradient of weights


ATTENTION = """
import torch
import torch_npu
from megascend.training.kernels.npu import causal_attention

def plain(q, k, v, packed, window, scaling):
    parts = [whole.split(packed, 2) if packed else [whole] for whole in (q, k, v)]
    found = []
    for a, b, c in zip(*parts):
        apart = torch.arange(a.shape[2])[:, None] - torch.arange(a.shape[2])
        seen = (apart >= 0) & (apart < (window or a.shape[2]))
        b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], 1) for x in (b, c))
        scores = (a @ b.mT * scaling).masked_fill(~seen, -torch.inf)
        found.append(scores.softmax(-1) @ c)
    return torch.cat(found, 2)

torch.manual_seed(0)
for packed, window, width in (((5, 1, 7), None, 8), (None, None, 8), ((5, 1, 7), 3, 8), (None, 4, 8), ((6, 7), None, 4)):
    batch = 1 if packed else 2
    shapes = (batch, 4, 13, 8), (batch, 2, 13, 8), (batch, 2, 13, width)
    grad = torch.randn(batch, 4, 13, width)
    results = []
    for where in ("cpu", "npu"):
        torch.manual_seed(1)
        inputs = [torch.randn(shape).to(where).requires_grad_() for shape in shapes]
        scaling = None if window is None else 0.5
        if where == "cpu":
            out = plain(*inputs, packed, window, scaling or 8**-0.5)
        else:
            out = causal_attention(*inputs, packed, window=window, scaling=scaling)
        out.backward(grad.to(where))
        results.append([out.detach().cpu(), *(each.grad.cpu() for each in inputs)])
    for mine, expected in zip(results[1], results[0]):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
print("equal")
"""
"""Compares the operator with the formula, forward and backward: packed, padded, grouped keys, window, narrower values."""


@pytest.mark.nightly  # covered: trajectories in the same file
def test_attention_equals_the_formula(run_python):
    assert run_python(ATTENTION, huggingface=True).stdout.split()[-1] == "equal"


@pytest.mark.nightly
def test_more_trajectories_equal_hugging_face(run_python, parity_folder, tmp_path):
    compare_with_hugging_face(MORE, run_python, parity_folder, tmp_path)


TENANTS = {
    "a": Lora(rank=4, alpha=8.0, seed=1),
    "b": Lora(rank=9, alpha=6.0, rslora=True, seed=2, targets=("q_proj", "v_proj", "o_proj")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_adapters_equal_peft(arch, run_python, parity_folder, tmp_path):
    """Train two tenants in one batch on two ranks, with recomputation."""
    checkpoint = case_checkpoint(parity_folder, arch)
    starts = {str(tmp_path / name): lora for name, lora in TENANTS.items()}
    options = {"platform": "npu", "recompute": RECOMPUTED}
    (_, (trajectories, _, held_memory)), _ = on_the_device(
        run_python,
        tmp_path,
        ("written", (str(checkpoint), starts), {}),
        ("trained", (str(checkpoint), 2, list(starts), str(tmp_path / "out")), options),
    )
    assert [rank["gradients"] for rank in held_memory] == [0, 0]
    for tenant, (start, trajectory) in enumerate(zip(starts, trajectories, strict=True)):
        tokens = share_of(tenant, len(starts))
        deviation = adapter_differences(trajectory, peft_reference(parity_folder, checkpoint, Path(start), tokens))
        print(f"{arch}, {Path(start).name}: {deviation}")
        assert_within(deviation, loss=1e-5, grad_norm=1e-4, factors=1e-3)
