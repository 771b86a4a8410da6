"""The two factors of one adapted weight, whole: what is saved, loaded and merged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
