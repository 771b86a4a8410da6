"""What adapters act on: a linear layer of the model, the Hugging Face weights that lie in it, and the rows of this rank.

Megatron fuses what Hugging Face keeps apart (q, k and v; gate and up). An adapter is defined on the Hugging Face side,
as peft has it, so a fused layer has several slices, each with factors of its own. Which layers of an architecture have
which weights say the maps in :mod:`megascend.lora.target_maps`; a transformers model says it itself
(:mod:`megascend.lora.transformers_targets`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from megascend.errors import ConfigError
from megascend.kernels.softmax import VocabShard
from megascend.topology.topology import Coordinates, Topology

EMBEDDING, OUTPUT = "embed_tokens", "lm_head"
"""What transformers calls the modules before and after the layers. ``all-linear`` does not mean them, as in peft."""


@dataclass(frozen=True)
class FusedSlice:
    """One Hugging Face weight inside a Megatron layer.

    Attributes:
        name: the weight's module in the Hugging Face model, e.g. ``model.layers.0.self_attn.q_proj``.
        out_features: rows of the whole Hugging Face weight.
        local_rows: int64 [n], rows of the Megatron layer on this rank that belong to it.
        global_rows: int64 [n], which rows of the Hugging Face weight these are.
    """

    name: str
    out_features: int
    local_rows: Tensor
    global_rows: Tensor


@dataclass(frozen=True)
class TargetModule:
    """One layer that adapters act on: a linear layer, or the embedding, which is one of one-hot inputs.

    Attributes:
        module: the layer.
        split: ``column`` if tensor parallel ranks share its output (the output layer's is the vocabulary), ``row`` if they
            share its input (the embedding's is).
        slices: the Hugging Face weights in it, at least one.
        in_features, out_features: of this rank; rows that pad a vocabulary do not count.
        in_start, in_total: this rank's first input column, and the whole weight's columns.
        experts, expert_start, expert_total: experts of this rank, the first one's number, and of the model; 1, 0 and None
            where the layer is no expert layer.
        moe: Megatron's mixture-of-experts layer around it, or None.
        drawn_as: the projection by whose name its dropout is drawn, if not the first of ``slices``.
    """

    module: Any
    split: Literal["column", "row"]
    slices: tuple[FusedSlice, ...]
    in_features: int
    out_features: int
    in_start: int
    in_total: int
    experts: int = 1
    expert_start: int = 0
    expert_total: int | None = None
    moe: Any = None
    drawn_as: str | None = None

    @classmethod
    def of(
        cls,
        module: Any,
        split: Literal["column", "row"],
        layout: ModelLayout,
        slices: Sequence[FusedSlice],
        moe: Any = None,
    ) -> TargetModule:
        """Build a linear layer of Megatron's by its weight on this rank; ``moe``: the layer whose experts' weights it holds, or
        None.
        """
        missing = [fused_slice.name for fused_slice in slices if moe is None and not layout.has(fused_slice.name)]
        if missing:
            raise ConfigError(f"adapters: the checkpoint has no {missing[0]}.weight, which Megatron's layer is made of")
        rows, columns = weight_shape(module)
        rank, size = layout.tensor_rank(expert=moe is not None)
        start, total = (rank * columns, columns * size) if split == "row" else (0, columns)
        if moe is None:
            return cls(module, split, tuple(slices), columns, rows, start, total)
        everyone = layout.config.num_moe_experts
        count = everyone // layout.topology.expert
        first = layout.place.expert * count
        return cls(module, split, tuple(slices), columns, rows, start, total, count, first, everyone, moe)

    @property
    def is_expert(self) -> bool:
        """True for the layers of routed experts."""
        return self.expert_total is not None

    @property
    def is_embedding(self) -> bool:
        """True for the embedding."""
        return is_embedding(self.slices[0].name)

    @property
    def is_output(self) -> bool:
        """True for the output layer."""
        return is_output(self.slices[0].name)

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """Target modules with the same value have factors of the same shapes, split in the same way."""
        names = tuple(fused_slice.name.rsplit(".", 1)[-1] for fused_slice in self.slices)
        return (self.split, self.is_expert, self.experts, self.in_features, self.out_features, names)


class ModelLayout:
    """What is needed to find a layer's Hugging Face names and this rank's rows."""

    def __init__(
        self, config: Any, topology: Topology, place: Coordinates, tensor_names: Collection[str], vocab_size: int
    ) -> None:
        self.config, self.topology, self.place, self.vocab_size = config, topology, place, vocab_size
        self.names = set(tensor_names)
        first = next((match for name in sorted(self.names) if (match := re.match(r"^(.*?)layers\.\d+\.", name))), None)
        self.prefix = first.group(1) if first else ""

    def name(self, number: int, *path: str) -> str:
        """Full name of a module in layer ``number`` (from 0), e.g. ``name(2, "self_attn", "q_proj")``."""
        return ".".join([f"{self.prefix}layers.{number}", *path])

    def has(self, module: str) -> bool:
        """True if the checkpoint has a weight of that module."""
        return f"{module}.weight" in self.names or module in self.names

    def tensor_rank(self, *, expert: bool) -> tuple[int, int]:
        """(this rank, ranks) that share a linear layer, of experts or outside of them."""
        if expert:
            return self.place.expert_tensor, self.topology.expert_tensor
        return self.place.tensor, self.topology.tensor

    def vocab_shard(self, module: Any) -> VocabShard:
        """The rows of an embedding or output layer on this rank, without padding."""
        return VocabShard.of_rank(self.vocab_size, module.weight.shape[0], self.place.tensor, None)


def is_embedding(name: str) -> bool:
    """Whether a projection is the embedding."""
    return name.split(".")[-1] == EMBEDDING


def is_output(name: str) -> bool:
    """Whether a projection is the output layer."""
    return name.split(".")[-1] == OUTPUT


def matches(name: str, targets: Literal["all-linear"] | Sequence[str]) -> bool:
    """True if the projection ``name`` is among ``targets``: itself, or its last components, as in peft."""
    if targets == "all-linear":
        return not is_embedding(name) and not is_output(name)
    return any(name == target or name.endswith(f".{target}") for target in targets)


def check_untied(targets: Literal["all-linear"] | Sequence[str], prefix: str, *, tied: bool) -> None:
    """Raise ConfigError if ``targets`` name a weight that embedding and output layer share.

    Merging such an adapter would change both uses, of which peft warns. ``prefix``: of the embedding's name.
    """
    for name in (f"{prefix}{EMBEDDING}", OUTPUT):
        if tied and matches(name, targets):
            raise ConfigError(
                f"adapters.targets names {name!r}, but this model has one weight for {EMBEDDING} and {OUTPUT} "
                "(tie_word_embeddings): an adapter merged into one would change the other. Save the model untied first: load "
                f"it in transformers with tie_word_embeddings=False, copy {EMBEDDING}'s weight to {OUTPUT}, save_pretrained()"
            )


def restrict(target: TargetModule, targets: Literal["all-linear"] | Sequence[str]) -> TargetModule | None:
    """``target`` with only the targeted slices, or None if there are none."""
    kept = tuple(fused_slice for fused_slice in target.slices if matches(fused_slice.name, targets))
    return replace(target, slices=kept) if kept else None


def weight_shape(module: Any) -> tuple[int, int]:
    """(output, input) features of a linear layer's weight on this rank; of experts, of each one's."""
    weight = module.weight0 if hasattr(module, "weight0") else module.weight
    return weight.shape[0], weight.shape[1]
