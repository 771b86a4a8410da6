"""Unsharded adapters, as saved and loaded, and merging them into exported weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from megascend.config import Lora
from megascend.config.data import ProblemType
from megascend.reference.reductions import to_dtype
from megascend.training.lora.target_modules import HEAD, is_embedding


@dataclass(frozen=True)
class Factors:
    """``lora_A`` and ``lora_B`` of one projection, on the CPU, in float32, not sharded.

    Attributes:
        a: [rank, in]; of experts [experts, rank, in]. An embedding's ``in`` is the vocabulary, an output layer's ``out``.
        b: [out, rank]; of experts [experts, out, rank].
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a.shape[-2]

    def delta(self, scaling: float) -> Tensor:
        """Return ``scaling * B A``: [out, in]; of experts [experts, out, in]."""
        return scaling * (self.b @ self.a)


@dataclass(frozen=True)
class UnshardedAdapter:
    """An adapter in no layout: as it is saved, merged and sent.

    Attributes:
        values: factors by projection.
        moments: Adam's first and second moment, as ``values``, or None if only weights were saved (by peft, for example).
        labels: labels of its scalar head's rows; None without a head, or if they are not recorded (by peft, for example).
        problem_type: what its head learns; None for reward models.
        taken, step_count, skipped_in_a_row, loss_scale, good_steps: as in Adapter; zero without ``moments``.
    """

    lora: Lora
    values: dict[str, Factors]
    moments: tuple[dict[str, Factors], dict[str, Factors]] | None = None
    taken: int = 0
    step_count: int = 0
    skipped_in_a_row: int = 0
    loss_scale: float | None = None
    good_steps: int = 0
    labels: tuple[str, ...] | None = None
    problem_type: ProblemType | None = None


def head_factors(weight: Tensor, rank: int) -> Factors:
    """Return a scalar head's weight [labels, h], or its gradient, as factors; see ``target_modules.HEAD``."""
    a = weight.new_zeros(rank, weight.numel())
    a[0] = weight.flatten()
    return Factors(a, weight.new_zeros(len(weight), rank))


def head_weight(factors: Factors) -> Tensor:
    """Return the weight [labels, h] that :func:`head_factors` holds."""
    return factors.a[0].view(len(factors.b), -1)


EXPERT_WEIGHT = re.compile(
    r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|gate_up_proj)\.weight$"
)


def merged(
    adapter: UnshardedAdapter | None,
    transposed: Collection[str] = (),
    model_name: Callable[[str], str] = str,
) -> Callable[[str, Tensor], Tensor] | None:
    """Return a function that adds ``scaling * B A`` to every weight of a Hugging Face checkpoint that the adapter adapts.

    A scalar head is replaced by the adapter's. Experts may be stored separately or fused; gate and up, too. The result has the
    weight's dtype; a number beyond its range is a CheckpointError. None without an adapter, as on ranks that write nothing.

    Args:
        transposed: names of fused experts stored as [experts, in, out].
        model_name: maps a name in the checkpoint to the one in transformers' model, which factors use.
    """
    if adapter is None:
        return None
    lora, factors = adapter.lora, adapter.values

    def merge(name: str, weight: Tensor) -> Tensor:
        if name == f"{HEAD}.weight" and HEAD in factors:
            return to_dtype(name, head_weight(factors[HEAD]).to(weight.device), weight.dtype)
        delta = delta_for(model_name(name), lora, factors)
        if delta is None:
            return weight
        if name in transposed:
            delta = delta.mT
        # In fp32: added to a 16-bit weight, most of a small delta would be lost.
        return to_dtype(name, weight.float() + delta.to(weight.device), weight.dtype)

    return merge


def delta_for(name: str, lora: Lora, factors: dict[str, Factors]) -> Tensor | None:
    """Return ``scaling * B A`` for the checkpoint's tensor ``name``; None if the adapter does not adapt it."""
    module = name.removesuffix(".weight")
    if module in factors:
        delta = factors[module].delta(lora.scaling)
        # An embedding's weight is [in, out].
        return delta.mT if is_embedding(module) else delta
    single = EXPERT_WEIGHT.match(name)
    if single is None:
        return None
    number, part = int(single["number"]), single["part"]
    fused = "down_proj" if part == "down_proj" else "gate_up_proj"
    pair = factors.get(f"{single['experts']}.{fused}")
    if pair is None:
        return None
    delta = lora.scaling * (pair.b[number] @ pair.a[number])
    if part in ("down_proj", "gate_up_proj"):
        return delta
    gate, up = torch.chunk(delta, 2)
    return gate if part == "gate_proj" else up
