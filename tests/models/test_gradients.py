"""Every parameter's gradient in every layout, and their norm, against transformers' gradients.

A norm hides what cancels, and trained weights hide factors that Adam divides by: here the gradient of every parameter is compared,
after its reduction over ranks, by its name in the checkpoint. A parameter that is replicated over tensor parallel ranks and whose
gradient is a rank's part (norms, routers and latent projections under sequence parallelism) shows here, and one that the norm
counts twice or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend import Parallel
from megascend.models import expert_count
from megascend.models.registry import proven
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint, causal_samples, hf_reference, token_lists
from support.covering import FIRST_STACK

pytestmark = pytest.mark.usefixtures("megatron_imported")

RELATIVE = 1e-4
"""Of a parameter's gradient, and of the norm of all."""
PLAIN: dict[str, Any] = {"optimizer": {"distributed": False}}
"""The distributed optimizer leaves each data parallel rank a part of the reduced gradients."""
LAYOUTS = (
    Case("single"),
    Case("TP2", 2, Parallel(tensor=2)),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("PP2", 2, Parallel(pipeline=2)),
    Case("CP2", 2, Parallel(context=2), **PLAIN),
    Case("DP2", 2, **PLAIN),
)
OF_EXPERTS = (
    Case("EP2", 2, Parallel(expert=2), **PLAIN),
    Case("TP2 x EP2 + SP", 2, Parallel(tensor=2, expert=2, expert_tensor=1)),
    Case("TP2 x EP2 + SP, ETP2", 4, Parallel(tensor=2, expert=2, expert_tensor=2), **PLAIN),
)
TIED = {"tie_word_embeddings": True}
OF_TIED_EMBEDDINGS = (
    Case("PP2 tied", 2, Parallel(pipeline=2), overrides=TIED),
    Case("TP2 x PP2 + SP tied", 4, Parallel(tensor=2, pipeline=2, sequence=True), overrides=TIED),
)
IN_CI = ("deepseek_v3: TP2 x EP2 + SP", "gpt_oss: TP2 x EP2 + SP", "qwen3: TP2 x PP2 + SP tied")
"""Latent attention, shared experts and a router; sinks and biases of experts; norms of heads, and tied embeddings."""


def cases() -> list[Case]:
    selected = []
    for architecture in proven():
        has_experts = expert_count(architecture.tiny) > 0
        for case in LAYOUTS + (OF_EXPERTS if has_experts else ()) + OF_TIED_EMBEDDINGS:
            if has_experts and case.parallel.tensor > 1 and case.parallel.sequence is None and case.name == "TP2":
                continue  # sequence parallelism is the default with experts
            divided = case.parallel.tensor > 1 and case.parallel.expert_tensor != 1
            if has_experts and divided and architecture.biases == "all":
                continue  # Megatron-Core does not divide experts that have biases
            name = f"{architecture.model_type}: {case.name}"
            selected.append(replace(case, name=name, arch=architecture.model_type))
    return selected


CASES = cases()


@dataclass(frozen=True)
class Gradients:
    """Reduced gradients by the names of a checkpoint, and the optimizer's norm of them."""

    values: dict[str, Tensor]
    norm: float


def reduced_gradients(case: Case, checkpoint: Path, tokens: list[list[int]]) -> Gradients:
    """Return what the optimizer is about to step with, on one rank of ``case``."""
    with case_backend(case, checkpoint) as backend:
        optimizer, chunks = backend.engine.optimizer, backend.engine.bare_chunks
        update, reduced = optimizer._update, []

        def record(lr: float) -> Any:
            reduced.extend([p.main_grad.clone() for p in chunk.parameters()] for chunk in chunks)
            return update(lr)

        optimizer._update = record
        backend.forward_backward(backend.shard(causal_samples(tokens)))
        norm = backend.optimizer_step().grad_norm
        # Gradients have their parameters' shapes: exported in their places, they are gathered and renamed as weights are.
        for chunk, gradients in zip(chunks, reduced, strict=True):
            for parameter, gradient in zip(chunk.parameters(), gradients, strict=True):
                parameter.data.copy_(gradient)
        return Gradients({name: tensor.clone() for name, tensor in backend.engine.named_weights()}, norm)


def compare(case: Case, folder: Path) -> dict[str, float]:
    """Return, for each gradient that differs from transformers' by more than RELATIVE, the relative difference."""
    checkpoint, tokens = case_checkpoint(folder, case.arch, **case.overrides), token_lists()
    ranks = run_distributed(reduced_gradients, case.world_size, case, checkpoint, tokens, init=False, timeout_s=180)
    expected = hf_reference(folder, checkpoint, tokens, steps=0, gradients=True).gradients
    exact = hf_reference(folder, checkpoint, tokens, steps=0, gradients=True, dtype="float64").gradients
    total = float(torch.cat([tensor.flatten() for tensor in exact.values()]).norm())
    wrong = {}
    for rank, gradients in enumerate(ranks):
        missing = expected.keys() - gradients.values.keys()
        assert not missing, missing
        for name, tensor in exact.items():
            bound = RELATIVE * float(tensor.norm()) + 1e-8 * total
            # Where a model amplifies rounding, the bound is twice what transformers' own fp32 is away from fp64.
            bound = max(bound, 2 * float((expected[name] - tensor).norm()))
            difference = float((gradients.values[name].double() - tensor).norm())
            if not difference <= bound:
                wrong[f"rank {rank}: {name}"] = difference / float(tensor.norm())
        if abs(gradients.norm - total) > RELATIVE * total:
            wrong[f"rank {rank}: norm"] = gradients.norm / total - 1
    return wrong


@pytest.mark.parametrize(
    "case",
    [case if case.name in IN_CI and FIRST_STACK else pytest.param(case, marks=pytest.mark.nightly) for case in CASES],
    ids=lambda case: case.name,
)
def test_gradients_equal_transformers(case: Case, parity_folder: Path) -> None:
    assert compare(case, parity_folder) == {}


def test_selection_for_ci_names_cases() -> None:
    assert set(IN_CI) <= {case.name for case in CASES}
    assert {case.arch for case in CASES} == {architecture.model_type for architecture in proven()}
