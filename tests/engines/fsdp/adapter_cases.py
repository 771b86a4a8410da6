"""Training of adapters with any engine, to compare with the FSDP engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megascend import Lora, Sample
from megascend.testing.parity import causal_samples, token_lists

DROPPING = {
    "a": Lora(rank=3, dropout=0.3, seed=1),
    "b": Lora(rank=8, alpha=8.0, dropout=0.5, seed=2, targets=("v_proj", "gate_proj", "down_proj", "lm_head")),
}


def samples_of(names: Sequence[str]) -> list[Sample]:
    """Build one sample per length, of each adapter in turn."""
    return [
        replace(sample, adapter=names[index % len(names)]) for index, sample in enumerate(causal_samples(token_lists()))
    ]


def steps(backend: Any, samples: Sequence[Sample], count: int) -> list[tuple[float, float]]:
    """Return loss and norm of every adapter in every step."""
    figures = []
    for _ in range(count):
        result, step = backend.forward_backward(backend.shard(samples)), backend.optimizer_step()
        figures += [(result.adapters[name].loss, step.adapters[name].grad_norm) for name in sorted(step.adapters)]
    return figures
