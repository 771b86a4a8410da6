"""Adapters on the FSDP engine against peft and torch AdamW in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import Job, run_jobs
from torch import Tensor

from megascend import Adapters, Batching, Fsdp, Lora, Parallel, Recompute
from megascend.testing.parity import case_checkpoint, token_lists
from support.lora_parity import ALL, adapter_differences, peft_reference, share_of
from support.stacks import FIRST_STACK

RANKS = Path(__file__).with_name("adapter_ranks.py")
SP2 = Parallel(context=2, context_algorithm="ulysses")
EP2, EP4, EP2_SP2 = Parallel(expert=2), Parallel(expert=4), SP2.model_copy(update={"expert": 2})
RECOMPUTED = Recompute(granularity="full")
PADDED = Batching(packing=False, micro_batch_tokens=200)
ONE = {"one": Lora(rank=8, alpha=12.0, seed=8, targets=ALL)}
"""All linear layers, the output layer and the embedding. With seed 7 one gradient is so near 0 that Adam makes a step of its
rounding: losses are then 1.2e-5 from peft's, alike on one rank and on two."""
TENANTS = {
    "a": Lora(rank=4, alpha=8.0, seed=1),
    "b": Lora(rank=9, alpha=6.0, rslora=True, seed=2, targets=("q_proj", "v_proj", "down_proj")),
    "c": Lora(rank=2, alpha=6.0, seed=3, targets=("o_proj", "up_proj", "lm_head", "embed_tokens")),
}
EXPERT_TENANTS = {
    "a": Lora(rank=4, alpha=8.0, seed=1),
    "b": Lora(rank=9, alpha=6.0, seed=2, targets=("q_proj", "experts.down_proj")),
    "c": Lora(rank=2, alpha=6.0, seed=3, targets=("o_proj", "experts.gate_up_proj")),
}

HYBRID_TENANTS = {
    "a": Lora(rank=4, alpha=8.0, seed=1),
    "b": Lora(rank=9, alpha=6.0, seed=2, targets=("in_proj_qkvz", "in_proj_ba", "q_proj")),
    "c": Lora(rank=2, alpha=6.0, seed=3, targets=("out_proj", "experts.gate_up_proj")),
}
SETTINGS: dict[str, dict[str, Any]] = {"qwen3_next": {"rms_norm_eps": 1e-2}, "qwen3_5_text": {"rms_norm_eps": 1e-2}}
"""Of tiny models, by architecture: the gated norm of linear attention divides by sizes that are near 0 for some tokens."""

Layout = tuple[str, str, dict[str, Lora], int, dict[str, Any]]
LAYOUTS: list[Layout] = [
    ("Qwen3, three tenants, SP2, recomputed", "qwen3", TENANTS, 2, {"parallel": SP2, "recompute": RECOMPUTED}),
    (
        "Qwen3-MoE, three tenants, EP2, recomputed",
        "qwen3_moe",
        EXPERT_TENANTS,
        2,
        {"parallel": EP2, "recompute": RECOMPUTED},
    ),
]
MORE: list[Layout] = [
    # Covered: factors of dense layers and of experts; test_linear_attention.py.
    *([("Qwen3-Next, three tenants, DP2", "qwen3_next", HYBRID_TENANTS, 2, {})] if FIRST_STACK else []),
    ("Qwen3-MoE, three tenants, DP2, recomputed", "qwen3_moe", EXPERT_TENANTS, 2, {"recompute": RECOMPUTED}),
    ("Qwen3-MoE, three tenants, EP2 x FSDP2", "qwen3_moe", EXPERT_TENANTS, 4, {"parallel": EP2}),
    ("Qwen3-MoE, three tenants, EP2, SP2", "qwen3_moe", EXPERT_TENANTS, 2, {"parallel": EP2_SP2}),
    ("Qwen3-MoE, one adapter, EP4", "qwen3_moe", {"one": Lora(rank=8, alpha=12.0, seed=8)}, 4, {"parallel": EP4}),
    ("Qwen3, one adapter, DP2", "qwen3", ONE, 2, {}),
    ("Qwen3, three tenants, DP2", "qwen3", TENANTS, 2, {}),
    ("Qwen3, three tenants, DP2, padded", "qwen3", TENANTS, 2, {"batching": PADDED}),
    ("Qwen3, three tenants, HSDP 2x2, offload", "qwen3", TENANTS, 4, {"fsdp": Fsdp(replicate=2, offload=True)}),
    ("Qwen3, three tenants, SP2 x DP2", "qwen3", TENANTS, 4, {"parallel": SP2}),
    ("Qwen3-MoE, three tenants, SP2", "qwen3_moe", EXPERT_TENANTS, 2, {"parallel": SP2}),
    ("Qwen3-MoE, three tenants, 3 ranks", "qwen3_moe", EXPERT_TENANTS, 3, {"fsdp": Fsdp(reshard_after_forward=False)}),
    ("Qwen2-MoE (shared expert), three tenants, DP2", "qwen2_moe", EXPERT_TENANTS, 2, {}),
    ("Qwen3 bf16, one adapter, DP2", "qwen3", {"one": Lora(rank=8, alpha=12.0, seed=8)}, 2, {"precision": "bf16"}),
    ("Qwen3 fp16, one adapter, DP2", "qwen3", {"one": Lora(rank=8, alpha=12.0, seed=8)}, 2, {"precision": "fp16"}),
    ("GLM-4-MoE (shared expert), three tenants, DP2", "glm4_moe", EXPERT_TENANTS, 2, {}),
    (
        "Qwen3-Next, three tenants, EP2, recomputed",
        "qwen3_next",
        HYBRID_TENANTS,
        2,
        {"parallel": EP2, "recompute": RECOMPUTED},
    ),
    ("Qwen3-Next, three tenants, padded", "qwen3_next", HYBRID_TENANTS, 1, {"batching": PADDED}),
    ("Qwen3.5, one adapter", "qwen3_5_text", {"one": Lora(rank=8, alpha=12.0, seed=8)}, 1, {}),
]

BOUNDS = {"fp32": (1e-5, 1e-4, 1e-3, 2e-5), "bf16": (2e-2, 0.1, 1.0, 0.5), "fp16": (1e-2, 0.1, 1.0, 0.1)}
"""Bounds of loss, norm, trained factors and the saved adapter's logits, or twice peft's own rounding where that is larger."""


def in_process(folder: Path, *jobs: Job) -> list[Any]:
    """Run functions of adapter_ranks.py, one after the other, in a process of their own, and return their results."""
    return run_jobs(RANKS, folder, *jobs)


def targets_of(adapters: dict[str, Lora]) -> Any:
    """Return the targets that a backend of these adapters needs."""
    return ALL if any("lm_head" in lora.targets for lora in adapters.values()) else "all-linear"


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def compare_with_peft(layouts: list[Layout], parity_folder: Path, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Train the adapters of each layout for ten steps in the same micro batches, and compare each with peft's training of it."""
    checkpoints = {arch: case_checkpoint(parity_folder, arch, **SETTINGS.get(arch, {})) for _, arch, *_ in layouts}
    jobs: list[Job] = []
    for number, (_, arch, adapters, world_size, options) in enumerate(layouts):
        starts = {str(tmp_path / f"{number}-{name}"): lora for name, lora in adapters.items()}
        targets = targets_of(adapters)
        jobs.append(("written", (str(checkpoints[arch]), starts, targets), {}))
        arguments = (str(checkpoints[arch]), world_size, list(starts), str(tmp_path / f"{number}-out"), targets)
        jobs.append(("trained", arguments, options))
    results = in_process(tmp_path, *jobs)[1::2]
    problems = []
    for number, ((name, arch, adapters, _, options), (trajectories, logits, _)) in enumerate(
        zip(layouts, results, strict=True)
    ):
        single = len(adapters) == 1
        loss, norm, factors, logit = BOUNDS[options.get("precision", "fp32")]
        for tenant, trajectory in enumerate(trajectories):
            start = tmp_path / f"{number}-{list(adapters)[tenant]}"
            tokens = token_lists() if single else share_of(tenant, len(adapters))
            difference = adapter_differences(
                trajectory, peft_reference(parity_folder, checkpoints[arch], start, tokens)
            )
            print(f"{name}, {start.name}: {difference}")
            if difference.loss > loss or difference.grad_norm > norm or difference.factors > factors:
                problems.append((name, difference))
        out = tmp_path / f"{number}-out" / ("tenant" if single else f"tenant-{len(adapters) - 1}")
        saved = peft_reference(parity_folder, checkpoints[arch], out, token_lists(), steps=0)
        loaded = largest_difference(logits, saved.logits)
        print(f"{name}: logits of the last adapter in peft {loaded:.1e}")
        if loaded > logit:
            exact = peft_reference(parity_folder, checkpoints[arch], out, token_lists(), steps=0, dtype="float64")
            rounding = largest_difference(saved.logits, exact.logits)
            print(f"{name}: rounding of peft's logits {rounding:.1e}")
            if loaded > 2 * rounding:
                problems.append((name, loaded))
    assert not problems
    return results


def test_adapters_equal_pefts(parity_folder, tmp_path):
    """Use several ranks, scalings and targets in the same batches; the frozen model has no gradients."""
    results = compare_with_peft(LAYOUTS, parity_folder, tmp_path)
    for _, _, ranks in results:
        assert [memory["gradients"] for memory in ranks] == [0] * len(ranks)


@pytest.mark.nightly
def test_more_adapters_equal_pefts(parity_folder, tmp_path):
    compare_with_peft(MORE, parity_folder, tmp_path)


def test_tenants_are_isolated_saved_exported_and_refused(parity_folder, tmp_path):
    dense, tied = (
        str(case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2, **extra))
        for extra in ({}, {"tie_word_embeddings": True})
    )
    experts = str(case_checkpoint(parity_folder, "qwen3_moe", num_hidden_layers=2))
    starts = [str(tmp_path / arch) for arch in ("dense", "experts")]
    _, _, isolated, resumed, *exported, memory, refused = in_process(
        tmp_path,
        ("written", (dense, {starts[0]: ONE["one"]}, ALL), {}),
        ("written", (experts, {starts[1]: Lora(rank=4, seed=8)}), {}),
        ("kept_apart", (dense,), {}),
        ("resumed", (dense, str(tmp_path / "saved")), {}),
        ("exported", (dense, starts[0], str(tmp_path / "of dense"), 2, ALL), {}),
        (
            "exported",
            (experts, starts[1], str(tmp_path / "of experts"), 2, "all-linear"),
            {"parallel": EP2, "fsdp": Fsdp(offload=True)},
        ),
        ("in_bf16", (dense,), {}),
        ("refused", (tied, 2), {"adapters": Adapters(targets=("lm_head",))}),
    )
    assert all(isolated.values()), isolated
    assert resumed["same"]
    assert resumed["again"] == resumed["figures"]
    assert resumed["on one"] == [pytest.approx(row, abs=2e-5, rel=0) for row in resumed["again"]]
    for export in exported:
        assert export["same"] == [True, True], export
        assert export["furthest"] <= 2e-5, export
        assert min(export["counts"]) > 20
    numbers = 115_072  # of the model of two layers: two bytes each, over two ranks
    assert memory == [{"bytes": numbers, "gradients": 0}] * 2
    assert all("tie_word_embeddings" in message for message in refused), refused
