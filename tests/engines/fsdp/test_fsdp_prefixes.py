"""Samples whose common prefixes are computed once train as separate samples do, on engine fsdp, in processes without Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import run_jobs

from megascend import Fsdp, Parallel, Recompute
from megascend.testing.parity import Case, TrainingCurve, bounds, case_checkpoint, differences, hf_reference
from support import prefix_runs
from support.model_checks import assert_within

RECOMPUTED = {"recompute": Recompute(granularity="full")}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "MoE EP2, recomputed": ("qwen3_moe", 2, {"parallel": Parallel(expert=2)} | RECOMPUTED),
}
MORE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DP2, recomputed": ("qwen3", 2, RECOMPUTED),
    "MoE EP2": ("qwen3_moe", 2, {"parallel": Parallel(expert=2)}),
    "selectively recomputed": ("qwen3", 1, {"recompute": Recompute(granularity="selective")}),
    "HSDP 2x2": ("qwen3", 4, {"fsdp": Fsdp(replicate=2)}),
    "latent attention": ("deepseek_v3", 1, {}),
    "sinks and windows": ("gpt_oss", 1, {}),
    "windows": ("mistral", 1, {}),
}
AMPLIFIED = {"latent attention": 2e-5}
"""Bound of losses where this order of rows amplifies rounding: without shared prefixes they are 1.3e-5 away."""


def compare(layouts: dict[str, tuple[str, int, dict[str, Any]]], parity_folder: Path, tmp_path: Path) -> None:
    checkpoints = [case_checkpoint(parity_folder, arch) for arch, _, _ in layouts.values()]
    jobs = [
        ("trajectory", ("fsdp", checkpoint, prefix_runs.BRANCHES), {"world_size": ranks, **settings})
        for checkpoint, (_, ranks, settings) in zip(checkpoints, layouts.values(), strict=True)
    ]
    results = run_jobs(Path(prefix_runs.__file__), tmp_path, *jobs)
    for name, checkpoint, figures in zip(layouts, checkpoints, results, strict=True):
        reference = hf_reference(parity_folder, checkpoint, prefix_runs.BRANCHES, 3)
        curve = TrainingCurve(figures["losses"], figures["norms"], [])
        difference = differences(curve, TrainingCurve(reference.losses, reference.grad_norms, []))
        print(f"{name}: loss {difference.loss:.1e}, norm {difference.grad_norm:.1e}, {figures['shared']} shared tokens")
        assert figures["shared"] > 0
        loss, norm = bounds(Case(name), parity_folder, checkpoint, prefix_runs.BRANCHES, 3)
        assert_within(difference, loss=AMPLIFIED.get(name, loss), grad_norm=norm)


def test_trajectories_equal_hugging_faces(parity_folder: Path, tmp_path: Path) -> None:
    compare(LAYOUTS, parity_folder, tmp_path)


@pytest.mark.nightly
def test_more_trajectories_equal_hugging_faces(parity_folder: Path, tmp_path: Path) -> None:
    compare(MORE, parity_folder, tmp_path)
