"""The two whole factors of an adapted weight, as saved and loaded; and merged into weights that are exported."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from megascend.config import Lora
from megascend.kernels.reductions import to_dtype
from megascend.lora.target_modules import is_embedding


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
        """``scaling * B A``: [out, in]; of experts [experts, out, in]."""
        return scaling * (self.b @ self.a)


OF_ONE_EXPERT = re.compile(
    r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|gate_up_proj)\.weight$"
)


def merged(
    adapter: tuple[Lora, dict[str, Factors]] | None, transposed: Collection[str] = ()
) -> Callable[[str, Tensor], Tensor] | None:
    """Return a function that adds ``scaling * B A`` to every weight of a Hugging Face checkpoint that the adapter adapts.

    Experts may be stored one by one or fused; gate and up, too. The result has the weight's dtype; a number beyond it is a
    CheckpointError. ``transposed``: fused experts stored as [experts, in, out]. None stays None (ranks that write nothing).
    """
    if adapter is None:
        return None
    lora, factors = adapter

    def merge(name: str, weight: Tensor) -> Tensor:
        delta = delta_for(name, lora, factors)
        if delta is None:
            return weight
        if name in transposed:
            delta = delta.mT
        return to_dtype(name, weight.float() + delta.to(weight.device), weight.dtype)

    return merge


def delta_for(name: str, lora: Lora, factors: dict[str, Factors]) -> Tensor | None:
    """``scaling * B A`` for the checkpoint's tensor ``name``, or None if the adapter leaves it alone."""
    module = name.removesuffix(".weight")
    if module in factors:
        delta = factors[module].delta(lora.scaling)
        return delta.mT if is_embedding(module) else delta
    single = OF_ONE_EXPERT.match(name)
    if single is None:
        return None
    number, part = int(single["number"]), single["part"]
    fused = "down_proj" if part == "down_proj" else "gate_up_proj"
    whole = factors.get(f"{single['experts']}.{fused}")
    if whole is None:
        return None
    delta = lora.scaling * (whole.b[number] @ whole.a[number])
    if part in ("down_proj", "gate_up_proj"):
        return delta
    gate, up = torch.chunk(delta, 2)
    return gate if part == "gate_proj" else up
