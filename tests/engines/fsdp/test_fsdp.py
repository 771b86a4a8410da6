"""The FSDP engine compared with Hugging Face and torch AdamW. Its ranks are forks of processes without Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Job, run_jobs

from megascend import Adapters, Batching, Fsdp, Moe, Parallel, Recompute
from megascend.testing.parity import (
    TrainingCurve,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
)
from megascend.testing.tiny_models import write_tiny_checkpoint

RANKS = Path(__file__).with_name("ranks.py")
TIED: dict[str, Any] = {"tie_word_embeddings": True}
RECOMPUTED = Recompute(granularity="full")
SP2, SP4 = (Parallel(context=size, context_algorithm="ulysses") for size in (2, 4))
EP2, SP2_EP2 = Parallel(expert=2), Parallel(context=2, context_algorithm="ulysses", expert=2)
BF16_RECOMPUTED: dict[str, Any] = {"precision": "bf16", "recompute": RECOMPUTED}


def in_process(folder: Path, *jobs: Job) -> list[Any]:
    """Run functions of ranks.py, one after the other, in a process of their own, and return their results."""
    return run_jobs(RANKS, folder, *jobs)


PADDED = Batching(packing=False, micro_batch_tokens=200)

Layout = tuple[str, str, dict[str, Any], int, dict[str, Any], float, float]

LAYOUTS: list[Layout] = [
    ("DP2", "qwen3", {}, 2, {}, 1e-5, 1e-4),
    ("HSDP 2x2, tied, offload", "qwen3", TIED, 4, {"fsdp": Fsdp(replicate=2, offload=True)}, 1e-5, 1e-4),
    ("SP2 x DP2", "qwen3", {}, 4, {"parallel": SP2}, 1e-5, 1e-4),
    ("MoE EP2 x FSDP2, recomputed", "qwen3_moe", {}, 4, {"parallel": EP2, "recompute": RECOMPUTED}, 1e-5, 1e-4),
]
MORE: list[Layout] = [
    ("HSDP 2x2, tied", "qwen3", TIED, 4, {"fsdp": Fsdp(replicate=2)}, 1e-5, 1e-4),
    ("DP2, offload, recomputed", "qwen3", {}, 2, {"fsdp": Fsdp(offload=True), "recompute": RECOMPUTED}, 1e-5, 1e-4),
    ("bf16 DP2", "qwen3", {}, 2, {"precision": "bf16"}, 2e-2, 0.1),  # covered: test_single.py, by the same code
    ("DP4", "qwen3", {}, 4, {}, 1e-5, 1e-4),
    ("MoE DP2, recomputed", "qwen3_moe", {}, 2, {"recompute": RECOMPUTED}, 1e-5, 1e-4),
    ("DP4, tied, kept gathered", "qwen3", TIED, 4, {"fsdp": Fsdp(reshard_after_forward=False)}, 1e-5, 1e-4),
    ("MoE on 3 ranks, 4 experts", "qwen3_moe", {}, 3, {}, 1e-5, 1e-4),
    ("MoE HSDP 2x2", "qwen3_moe", {}, 4, {"fsdp": Fsdp(replicate=2)}, 1e-5, 1e-4),
    ("dots1 DP2", "dots1", {}, 2, {}, 1e-5, 1e-4),
    ("Llama DP2", "llama", {}, 2, {}, 1e-5, 1e-4),
    # Not in mcore-bridge:
    ("OLMo 3 DP2", "olmo3", {}, 2, {}, 1e-5, 1e-4),
    ("SmolLM3 tied DP2", "smollm3", TIED, 2, {}, 1e-5, 1e-4),
    ("Mixtral DP2, recomputed", "mixtral", {}, 2, {"recompute": RECOMPUTED}, 1e-5, 1e-4),
    ("SP2, padded", "qwen3", {}, 2, {"parallel": SP2, "batching": PADDED}, 1e-5, 1e-4),
    ("SP4, 2 heads of keys", "qwen3", {}, 4, {"parallel": SP4}, 1e-5, 1e-4),
    ("MoE SP2, recomputed", "qwen3_moe", {}, 2, {"parallel": SP2, "recompute": RECOMPUTED}, 1e-5, 1e-4),
    ("fp16 DP2", "qwen3", {}, 2, {"precision": "fp16"}, 1e-2, 0.1),
    ("MoE EP2, HSDP 2x2", "qwen3_moe", {}, 4, {"parallel": EP2, "fsdp": Fsdp(replicate=2)}, 1e-5, 1e-4),
    ("MoE EP2 x FSDP2, offload", "qwen3_moe", {}, 4, {"parallel": EP2, "fsdp": Fsdp(offload=True)}, 1e-5, 1e-4),
    ("MoE SP2, EP2, recomputed", "qwen3_moe", {}, 2, {"parallel": SP2_EP2, "recompute": RECOMPUTED}, 1e-5, 1e-4),
]
SEEDS = range(4)
"""Seeds of the bf16 models with experts whose distances from fp32 are averaged."""


def compare_with_hugging_face(layouts: list[Layout], parity_folder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Train ten steps of each layout."""
    checkpoints = [case_checkpoint(parity_folder, arch, **overrides) for _, arch, overrides, *_ in layouts]
    jobs = [
        ("trajectory", (str(path), world_size), options)
        for path, (_, _, _, world_size, options, _, _) in zip(checkpoints, layouts, strict=True)
    ]
    results = in_process(tmp_path, *jobs)
    problems = []
    for (name, *_, loss, norm), path, ranks in zip(layouts, checkpoints, results, strict=True):
        reference = hf_reference(parity_folder, path, token_lists())
        difference = differences(
            TrainingCurve(ranks["losses"], ranks["norms"], []),
            TrainingCurve(reference.losses, reference.grad_norms, []),
        )
        print(f"{name}: loss {difference.loss:.1e}, norm {difference.grad_norm:.1e}")
        if not (difference.loss <= loss and difference.grad_norm <= norm):
            problems.append((name, difference))
    assert not problems
    return results


@pytest.mark.core
def test_trajectories_equal_hugging_faces(parity_folder, tmp_path):
    """Compare ten steps; each rank reads its part of the checkpoint, and no Megatron is imported in its process."""
    results = compare_with_hugging_face(LAYOUTS, parity_folder, tmp_path)
    assert all(ranks["foreign"] == [] for ranks in results)
    assert all(ranks["patched"] == "torch.cuda.random" for ranks in results)
    counts = [ranks["micro_batches"] for ranks in results]
    assert max(counts) > 1
    assert {ranks["reductions"] for ranks in results} == {1}  # of figures, after all micro batches
    assert [ranks["told"] for ranks in results] == [[(index, count) for index in range(count)] for count in counts]
    numbers = 4 * 189_120  # of the untied model, in bytes of fp32
    assert results[0]["read"] == [numbers // 2] * 2


@pytest.mark.nightly
def test_more_trajectories_equal_hugging_faces(parity_folder, tmp_path):
    compare_with_hugging_face(MORE, parity_folder, tmp_path)


@pytest.mark.nightly
def test_experts_in_bf16_are_no_further_from_fp32_than_hugging_faces(parity_folder, tmp_path):
    """Bound averages over ten steps of four models by twice Hugging Face's distance from fp32.

    A step of one model shows nothing: routers choose other experts in bf16, and its norm is off by 0.1 or by 1.2, as Hugging
    Face's is.
    """
    layouts: dict[str, dict[str, Any]] = {"DP2": BF16_RECOMPUTED, "EP2": {**BF16_RECOMPUTED, "parallel": EP2}}
    paths = [write_tiny_checkpoint(parity_folder / f"qwen3_moe-{seed}", "qwen3_moe", seed) for seed in SEEDS]
    jobs = [("trajectory", (str(path), 2), options) for options in layouts.values() for path in paths]
    results = in_process(tmp_path, *jobs)
    exact = [hf_reference(parity_folder, path, token_lists()) for path in paths]
    low = [hf_reference(parity_folder, path, token_lists(), dtype="bfloat16") for path in paths]
    expected = mean_differences([(run.losses, run.grad_norms) for run in low], exact)
    print("Hugging Face: loss {:.1e}, norm {:.1e}".format(*expected))
    for number, name in enumerate(layouts):
        ranks = results[number * len(paths) :][: len(paths)]
        actual = mean_differences([(run["losses"], run["norms"]) for run in ranks], exact)
        print("{}: loss {:.1e}, norm {:.1e}".format(name, *actual))
        pairs = list(zip(actual, expected, strict=True))
        assert all(0 < error <= 2 * reference_error for error, reference_error in pairs), (name, actual, expected)


def mean_differences(runs: list[tuple[list[float], list[float]]], exact: list[TrainingCurve]) -> tuple[float, float]:
    """Return the mean difference of losses and of norms, over all steps of all runs."""
    pairs = list(zip(runs, exact, strict=True))
    losses = [abs(a - b) for (actual, _), run in pairs for a, b in zip(actual, run.losses, strict=True)]
    norms = [abs(a - b) for (_, actual), run in pairs for a, b in zip(actual, run.grad_norms, strict=True)]
    return sum(losses) / len(losses), sum(norms) / len(norms)


def test_policy_and_preference_losses_equal_hugging_faces(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)
    tokens, generator = token_lists(), torch.Generator().manual_seed(5)
    fields: list[dict[str, Any]] = []
    samples = causal_samples(tokens)
    for index, sample in enumerate(samples):
        values = {
            name: offset + scale * torch.randn(len(sample), generator=generator)
            for name, offset, scale in (("old_logprobs", -6, 0.3), ("ref_logprobs", -6, 0.3), ("advantages", 0, 1))
        }
        for name, token_values in values.items():
            setattr(sample, name, token_values)
        sample.pair, sample.chosen, sample.label = index // 2, index % 2 == 0, index % 3 % 2
        names = {"pair": sample.pair, "chosen": sample.chosen, "label": sample.label}
        fields.append({name: v.tolist() for name, v in values.items()} | names)
    losses = ["importance_sampling", "ppo", "dpo", "orpo", "simpo", "kto"]
    data_parallel, sequence_parallel = in_process(
        tmp_path,
        ("one_step", (str(checkpoint), 2, samples, losses), {}),
        ("one_step", (str(checkpoint), 2, samples, losses), {"parallel": SP2}),
    )
    for loss in losses:
        reference = hf_reference(parity_folder, checkpoint, tokens, steps=1, loss=loss, fields=fields)
        for figures in (data_parallel, sequence_parallel):
            assert figures[loss] == pytest.approx((reference.losses[0], reference.grad_norms[0]), abs=1e-5, rel=2e-5), (
                loss
            )


def test_a_run_resumes_to_the_bit_and_in_another_layout(parity_folder, tmp_path):
    dense, experts = (str(case_checkpoint(parity_folder, arch, num_hidden_layers=2)) for arch in ("qwen3", "qwen3_moe"))
    *same, moved = in_process(
        tmp_path,
        ("resumed", (dense, str(tmp_path / "same")), {"precision": "fp16"}),
        ("resumed", (experts, str(tmp_path / "offloaded")), {"fsdp": Fsdp(offload=True), "parallel": EP2}),
        ("moved", (experts, str(tmp_path / "moved"), {"ranks": 3}, {"ranks": 2, "parallel": EP2}), {}),
    )
    assert [results["same"] for results in same] == [(True,) * 4] * 2
    assert moved["same"]
    assert moved["count"] > 20
    for actual, expected in zip(moved["figures"], moved["continued"], strict=True):
        assert actual == pytest.approx(expected, abs=2e-5, rel=0)


def test_exports_match_transformers(parity_folder, tmp_path):
    tied, experts = (
        str(case_checkpoint(parity_folder, arch, **extra)) for arch, extra in (("qwen3", TIED), ("qwen3_moe", {}))
    )
    exports = in_process(
        tmp_path,
        ("exported", (tied, str(tmp_path / "tied"), 2), {"fsdp": Fsdp(offload=True)}),
        ("exported", (experts, str(tmp_path / "experts"), 4), {"parallel": EP2}),
    )
    assert [different for different, _ in exports] == [[], []]
    assert max(furthest for _, furthest in exports) <= 2e-5


BALANCED: dict[str, Any] = {"moe": Moe(aux_loss="transformers", aux_loss_coefficient=0.1)}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "parallel.tensor=2": ("qwen3", {"parallel": Parallel(tensor=2)}),
    "parallel.context=2": ("qwen3", {"parallel": Parallel(context=2)}),
    "fsdp.replicate=3": ("qwen3", {"fsdp": Fsdp(replicate=3)}),
    "no experts": ("qwen3", {"parallel": EP2}),
    "no such loss": ("qwen3", BALANCED),
    "others' samples": ("qwen3_moe", BALANCED | {"adapters": Adapters()}),
}
"""Settings by words of their error."""


def test_failures_are_raised_on_all_ranks(parity_folder, tmp_path):
    """Cover a NaN of one rank, steps without gradients, routers that choose others in recomputation, a rank that leaves."""
    paths = {arch: str(case_checkpoint(parity_folder, arch, num_hidden_layers=2)) for arch in ("qwen3", "qwen3_moe")}
    dense, experts = paths.values()
    ranks, without_gradients, norms, left, *refused = in_process(
        tmp_path,
        ("not_finite", (dense,), {}),
        ("without_gradients", (dense, 2), {}),
        ("drifting", (experts,), {}),
        ("left_early", (dense,), {}),
        *[("refused", (paths[arch], 2), options) for arch, options in REFUSED.values()],
    )
    for step, unchanged, _ in ranks:
        assert (step.skipped, step.skipped_in_a_row, unchanged) == (True, 1, True)
    assert ranks[0][2] == ranks[1][2]
    for messages, unchanged in without_gradients:
        assert messages == 2 * ["optimizer_step: the model has no gradients; call forward_backward first"]
        assert unchanged
    assert norms["saved"] == pytest.approx(norms["plain"], rel=1e-5)
    assert abs(norms["torch"] - norms["plain"]) > 1e-3 * norms["plain"], (
        "torch's own recomputation should be wrong here"
    )
    assert left[1] == "left"
    assert "rank 1 left the stream" in left[0]
    for words, messages in zip(REFUSED, refused, strict=True):
        assert all(words in message for message in messages), (words, messages)
