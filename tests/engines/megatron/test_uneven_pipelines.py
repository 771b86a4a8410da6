"""Pipelines whose chunks differ in size: compared with transformers, resumed in other layouts, exported; adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megascend.config import Parallel, Recompute
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    case_backend,
    case_checkpoint,
    causal_samples,
    first_of_equals,
    hf_reference,
    token_lists,
)
from support.stacks import first_stack_required

pytestmark = [pytest.mark.usefixtures("megatron_imported"), first_stack_required]
STEPS = 3
LLAMA: dict[str, Any] = {"arch": "llama", "overrides": {"num_hidden_layers": 5}}
DEEPSEEK: dict[str, Any] = {"arch": "deepseek_v3", "overrides": {"num_hidden_layers": 5}}


def pipeline(layout: str, virtual: int = 1, **sizes: Any) -> Parallel:
    return Parallel(pipeline=2, virtual_pipeline=virtual, pipeline_layout=layout, **sizes)


CASES = [
    Case("PP2 x VPP2, ends without layers", 2, pipeline("E|tt|ttt|L", 2), **LLAMA),
    Case("MoE PP2 after a dense layer", 2, pipeline("Et|ttttL"), **DEEPSEEK),
    Case("PP2", 2, pipeline("Ettt|ttL"), **LLAMA),
    Case("PP2, the last stage without layers", 2, pipeline("Ettttt|L"), **LLAMA),
    Case("PP2 x VPP2", 2, pipeline("Ett|t|t|tL", 2), **LLAMA),
    Case("PP2, full recompute", 2, pipeline("Et|ttttL"), recompute=Recompute(granularity="full", layers=2), **LLAMA),
    Case(
        "PP2 tied", 2, pipeline("Et|ttttL"), arch="llama", overrides=LLAMA["overrides"] | {"tie_word_embeddings": True}
    ),
    Case("MoE TP2 x PP2 x EP2 + SP", 4, pipeline("Et*4|tL", tensor=2, expert=2, expert_tensor=1), **DEEPSEEK),
]
IN_CI = 1
"""Cases that run in CI, from the first: both ends without layers. Layers of two kinds: models/test_families.py, PP2."""


def compare(curve: TrainingCurve, losses: list[float], norms: list[float]) -> None:
    assert curve.losses == pytest.approx(losses, abs=1e-5, rel=0)
    assert curve.grad_norms == pytest.approx(norms, abs=1e-4, rel=0)


def train(case: Case, checkpoint: Path, folder: Path) -> TrainingCurve:
    """Run one rank: train, save after the first step, train on from what was saved, and export."""
    backend = case_backend(case, checkpoint)
    samples, losses, norms = backend.shard(causal_samples(token_lists())), [], []
    for number in range(STEPS):
        if number == 1:
            backend.save(folder / "saved", wait=True)
            backend.close()
            backend = case_backend(case, checkpoint)
            backend.load(folder / "saved")
        losses.append(backend.forward_backward(samples).loss)
        norms.append(backend.optimizer_step().grad_norm)
    backend.export_hf(folder / "hf")
    backend.close()
    return TrainingCurve(losses, norms, [])


def resume(case: Case, checkpoint: Path, folder: Path) -> TrainingCurve:
    """Run one rank of the steps after the first one, from a checkpoint of another layout."""
    backend = case_backend(case, checkpoint)
    backend.load(folder / "saved")
    samples, losses, norms = backend.shard(causal_samples(token_lists())), [], []
    for _ in range(1, STEPS):
        losses.append(backend.forward_backward(samples).loss)
        norms.append(backend.optimizer_step().grad_norm)
    backend.close()
    return TrainingCurve(losses, norms, [])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if index < IN_CI else pytest.mark.nightly, id=case.name)
        for index, case in enumerate(CASES)
    ],
)
def test_uneven_chunks_train_resume_and_export_like_transformers(
    case: Case, parity_folder: Path, tmp_path: Path
) -> None:
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    ranks = run_distributed(train, case.world_size, case, checkpoint, tmp_path, init=False, timeout_s=120)
    expected = hf_reference(parity_folder, checkpoint, token_lists(), steps=STEPS, weights=True)
    compare(first_of_equals(case.name, ranks), expected.losses, expected.grad_norms)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == load_file(checkpoint / "model.safetensors").keys()
    assert len(expected.weights) > 5 * 7
    # Adam moves a weight whose gradient is near 0 by up to a learning rate either way.
    assert max(float((exported[name] - weight).abs().mean()) for name, weight in expected.weights.items()) < 1e-5
    single = replace(case, name="single", world_size=1, parallel=Parallel())
    (curve,) = run_distributed(resume, 1, single, checkpoint, tmp_path, init=False, timeout_s=120)
    compare(curve, expected.losses[1:], expected.grad_norms[1:])
