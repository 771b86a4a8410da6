"""``transformer_engine.pytorch.LayerNorm``."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layernorm(nn.LayerNorm):
    """torch's LayerNorm with Transformer Engine's constructor."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
