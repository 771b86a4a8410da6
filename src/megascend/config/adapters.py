"""LoRA adapters."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from megascend.config.section import Section, Seed, Size
from megascend.config.training import Adam, Schedule


class Lora(Section):
    """One LoRA adapter: ``W x`` becomes ``W x + scaling * B A x`` in every targeted layer (Hu et al., arXiv:2106.09685)."""

    rank: Size = Field(16, description="rows of A, columns of B")
    alpha: float = Field(32.0, gt=0, description="scaling is alpha / rank, or alpha / sqrt(rank) with rslora")
    rslora: bool = Field(False, description="rank-stabilised scaling (Kalajdzievski, arXiv:2312.03732)")
    dropout: float = Field(0.0, ge=0, lt=1, description="of the layer's input on its way to A, while training")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Hugging Face names of the layers, whole or their ends (q_proj, mlp.down_proj, lm_head, embed_tokens); "
        "all-linear: every linear layer of attention, MLPs and experts, not the other two",
    )
    seed: Seed | None = Field(None, description="of A's first values and of dropout; default: the backend's")
    optimizer: Adam | None = Field(
        None, description="of this adapter alone; default: the backend's. Its state is small and not sharded"
    )
    schedule: Schedule | None = Field(None, description="over this adapter's own steps; default: the backend's")

    @model_validator(mode="after")
    def _targets(self) -> Lora:
        if not self.targets or not all(self.targets):
            raise ValueError("lora.targets must name at least one layer, and no empty name")
        return self

    @property
    def scaling(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Adapters(Section):
    """Train LoRA adapters on a frozen base model, and what any of them may ask for."""

    max_count: Size = Field(64, description="adapters at one time")
    max_rank: Size = Field(128, description="largest rank of one adapter")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="layers that adapters may target, as in Lora; each adapter chooses among them"
    )
