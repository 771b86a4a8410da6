"""Reduced gradients of a step on ranks, gathered to the names of a checkpoint, compared with transformers' and peft's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.testing import run_distributed
from megascend.testing.parity import (
    LENGTHS,
    Case,
    case_backend,
    case_checkpoint,
    causal_samples,
    hf_reference,
    token_lists,
)
from megascend.training.lora import peft_format
from support.lora_parity import adapter_backend, case_adapter, peft_gradients

RELATIVE = 1e-4
"""Largest difference of a parameter's gradient."""
NORM = 1e-6
"""Largest relative difference of the optimizer's norm from that of the gradients that were gathered: a small parameter that the
norm leaves out changes it by less than rounding changes gradients."""


@dataclass(frozen=True)
class Gradients:
    """Reduced gradients by name, and the optimizer's norm of them."""

    values: dict[str, Tensor]
    norm: float


def reduced_gradients(
    case: Case, checkpoint: Path, samples: list[Any], loss: Any = "cross_entropy", **settings: Any
) -> Gradients:
    """Return what the optimizer is about to step with, on one rank of ``case``."""
    with case_backend(case, checkpoint, **settings) as backend:
        return step_gradients(backend, lambda: backend.forward_backward(backend.shard(samples), loss))


def step_gradients(backend: Any, accumulate: Callable[[], Any]) -> Gradients:
    """Return what a Megatron backend's optimizer is about to step with after ``accumulate``, and step. Collective.

    Parameters are as the step left them afterwards.
    """
    optimizer, chunks = backend.engine.optimizer, backend.engine.bare_chunks
    update, reduced = optimizer._update, []

    def record(lr: float) -> Any:
        # An indexer of sparse attention has no gradients, and is not compared.
        reduced.extend([p.main_grad.clone() for p in chunk.parameters() if p.requires_grad] for chunk in chunks)
        return update(lr)

    optimizer._update = record
    accumulate()
    norm = backend.optimizer_step().grad_norm
    optimizer._update = update
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    weights = [parameter.data.clone() for parameter in parameters]
    # Gradients have their parameters' shapes: exported in their places, they are gathered and renamed as weights are.
    for parameter, gradient in zip(parameters, (gradient for part in reduced for gradient in part), strict=True):
        parameter.data.copy_(gradient)
    values = {name: tensor.clone() for name, tensor in backend.engine.named_weights()}
    for parameter, data in zip(parameters, weights, strict=True):
        parameter.data.copy_(data)
    return Gradients(values, norm)


def reduced_adapter_gradients(case: Case, checkpoint: Path, adapter: Path, out: Path) -> Gradients:
    """Return what an adapter's optimizer is about to step with, on one rank of ``case``; ``NAME.a`` and ``NAME.b``."""
    from megascend.training.lora import optimizer

    with adapter_backend(case, checkpoint) as backend:
        backend.load_adapter("tenant", adapter, optimizer=False)
        tenant, update, reduced = backend.adapters["tenant"], optimizer.update, []

        def record(*arguments: Any) -> Any:
            reduced.append(tenant.grads.clone())
            return update(*arguments)

        optimizer.update = record
        backend.forward_backward(backend.shard(causal_samples(token_lists())), adapter="tenant")
        norm = backend.optimizer_step().grad_norm
        tenant.values.data.copy_(reduced[0])
        backend.save_adapter("tenant", out)
    return Gradients(by_factor(peft_format.read(out)[1]), norm)


def by_factor(factors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name}.{letter}": tensor
        for name, pair in factors.items()
        for letter, tensor in (("a", pair.a), ("b", pair.b))
    }


def differences(
    ranks: Sequence[Gradients], expected: Mapping[str, Tensor], rounding: Mapping[str, float]
) -> dict[str, float]:
    """Return the relative difference of each gradient, and of the norm, that differs from ``expected`` by more than RELATIVE.

    Args:
        rounding: absolute differences that are allowed in any case.
    """
    total = float(torch.cat([tensor.flatten().double() for tensor in expected.values()]).norm())
    wrong = {}
    for rank, gradients in enumerate(ranks):
        missing = expected.keys() - gradients.values.keys()
        assert not missing, missing
        for name, tensor in expected.items():
            bound = max(RELATIVE * float(tensor.norm()) + 1e-8 * total, rounding.get(name, 0.0))
            difference = float((gradients.values[name].double() - tensor).norm())
            if not difference <= bound:
                wrong[f"rank {rank}: {name}"] = difference / max(float(tensor.norm()), 1e-30)
        norm = float(torch.cat([gradients.values[name].flatten().double() for name in expected]).norm())
        if not abs(gradients.norm - norm) <= NORM * norm:
            wrong[f"rank {rank}: norm"] = gradients.norm / norm - 1
    return wrong


def compare(case: Case, folder: Path, tokens: list[list[int]] | None = None, **settings: Any) -> dict[str, float]:
    """Compare all gradients of one step with transformers'; return those that differ."""
    checkpoint, tokens = case_checkpoint(folder, case.arch, **case.overrides), tokens or token_lists()
    arguments = case, checkpoint, causal_samples(tokens)
    ranks = run_distributed(reduced_gradients, case.world_size, *arguments, init=False, timeout_s=180, **settings)
    rounded = hf_reference(folder, checkpoint, tokens, steps=0, gradients=True).gradients
    exact = hf_reference(folder, checkpoint, tokens, steps=0, gradients=True, dtype="float64").gradients
    # Where a model amplifies rounding, the bound is twice what transformers' own fp32 is away from fp64.
    return differences(ranks, exact, {name: 2 * float((rounded[name] - exact[name]).norm()) for name in exact})


def errors_in_bf16(arch: str, folder: Path, **overrides: Any) -> tuple[float, float]:
    """Return how far all gradients of one step in bf16 are from transformers' in fp64: ours, and those of transformers' bf16.

    Both are 2-norms of the difference, relative to the norm of the gradients, over eight times the usual samples: both are
    draws of rounding that layers amplify. Their ratio varies by 2 to 5 % between single batches of dense models, by 10 % with
    Gemma 4's per-layer inputs, and by about a third of that here.
    """
    checkpoint = case_checkpoint(folder, arch, **overrides)
    # Not token 0: transformers has no gradient of the embedding of pad_token_id.
    tokens = [[max(token, 1) for token in ids] for ids in token_lists(lengths=LENGTHS * 8)]
    case, samples = Case("bf16", arch=arch, precision="bf16"), causal_samples(tokens)
    (gradients,) = run_distributed(reduced_gradients, 1, case, checkpoint, samples, init=False, timeout_s=180)
    rounded, exact = (
        hf_reference(folder, checkpoint, tokens, steps=0, gradients=True, dtype=dtype).gradients
        for dtype in ("bfloat16", "float64")
    )

    def error(values: Mapping[str, Tensor]) -> float:
        parts = [(values[name].double() - tensor).flatten() for name, tensor in exact.items()]
        return float(torch.cat(parts).norm()) / float(torch.cat([tensor.flatten() for tensor in exact.values()]).norm())

    return error(gradients.values), error(rounded)


def compare_adapter(case: Case, folder: Path, out: Path, seed: int) -> dict[str, float]:
    """Compare the gradients of an adapter on ``case.targets`` with peft's; return those that differ."""
    checkpoint = case_checkpoint(folder, case.arch, **case.overrides)
    adapter = case_adapter(checkpoint, Case("single", arch=case.arch, targets=case.targets), seed)
    ranks = run_distributed(
        reduced_adapter_gradients, case.world_size, case, checkpoint, adapter, out, init=False, timeout_s=180
    )
    return differences(ranks, by_factor(peft_gradients(folder, checkpoint, adapter, token_lists())), {})
