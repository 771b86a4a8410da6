"""Target modules of adapters: a linear layer of the model, the Hugging Face weights in it, and this rank's rows of them.

Megatron fuses weights that are separate in Hugging Face's format (q, k and v; gate and up). An adapter is defined on Hugging
Face's weights, as in peft, so a fused layer has several slices, each with its own factors. The maps in
:mod:`megascend.training.lora.target_maps` say which layers of an architecture hold which weights; for transformers models
:mod:`megascend.training.lora.transformers_targets` reads it from the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from megascend.config import VisionTower
from megascend.errors import ConfigError
from megascend.models import Images, architecture_named
from megascend.runtime.topology.topology import Coordinates, Topology
from megascend.training.kernels.softmax import VocabShard

EMBEDDING, OUTPUT = "embed_tokens", "lm_head"
"""Names in transformers of the modules before and after the layers. As in peft, ``all-linear`` does not include them."""
HEAD = "score"
"""Name in transformers of a scalar head, which every adapter of such a model has as a full weight (peft's modules_to_save).

Its factors are that weight, flattened, in the first row of A, and zeros, which have no gradient: neither the other rows of A nor
B, which has a row for each label, are used.
"""


Split = Literal["column", "row", "none"]
Rows = Literal["tokens", "patches", "features"]
"""Kinds of rows of a layer: tokens, or in a vision tower the patches of images or their features."""


@dataclass(frozen=True)
class FusedSlice:
    """One Hugging Face weight inside a Megatron layer.

    Attributes:
        name: the weight's module in the Hugging Face model, e.g. ``model.layers.0.self_attn.q_proj``.
        out_features: rows of the Hugging Face weight.
        local_rows: int64 [n], rows of the Megatron layer on this rank that belong to it.
        global_rows: int64 [n], the same rows' indices in the Hugging Face weight.
    """

    name: str
    out_features: int
    local_rows: Tensor
    global_rows: Tensor


@dataclass(frozen=True)
class TargetModule:
    """A layer that adapters act on: a linear layer, or the embedding, a linear layer of one-hot inputs.

    Attributes:
        module: the layer.
        split: ``column`` if tensor parallel ranks share its output (the output layer's is the vocabulary), ``row`` if they
            share its input (the embedding's is), ``none`` if each has all of it (down projections of latent attention).
        slices: the Hugging Face weights in it, at least one.
        in_features, out_features: features on this rank; rows that pad a vocabulary do not count.
        in_start, in_total: this rank's first input column, and the unsharded weight's columns.
        experts, expert_start, expert_total: experts on this rank, the index of the first, and experts of the model; 1, 0 and None
            if the layer is not an expert layer.
        moe: Megatron's mixture-of-experts layer around it, or None.
        drawn_as: the projection whose name seeds its dropout, if not the first of ``slices``.
        rows: kind of its rows, as in :data:`Rows`. Layers of a vision tower are complete on every tensor parallel rank, and each
            rank computes all of their rows, also under sequence parallelism.
    """

    module: Any
    split: Split
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
    rows: Rows = "tokens"

    @classmethod
    def of(
        cls,
        module: Any,
        split: Split,
        layout: ModelLayout,
        slices: Sequence[FusedSlice],
        moe: Any = None,
    ) -> TargetModule:
        """Build the target for a Megatron linear layer from its weight on this rank.

        ``moe``: the mixture-of-experts layer whose experts' weights it holds, or None.
        """
        # Experts may be stored one by one, so their fused names need not be in the checkpoint.
        missing = [fused_slice.name for fused_slice in slices if moe is None and not layout.has(fused_slice.name)]
        if missing:
            raise ConfigError(f"adapters: the checkpoint has no {missing[0]}.weight, which Megatron's layer is made of")
        rows, columns = weight_shape(module)
        rank, size = layout.tensor_rank(expert=moe is not None)
        # A row parallel layer has a part of the input columns, so this rank's A is a part, too; otherwise A is whole.
        start, total = (rank * columns, columns * size) if split == "row" else (0, columns)
        if moe is None:
            return cls(module, split, tuple(slices), columns, rows, start, total)
        total_experts = layout.config.num_moe_experts
        count = total_experts // layout.topology.expert
        # Megatron gives expert parallel ranks consecutive experts.
        first = layout.coordinates.expert * count
        return cls(module, split, tuple(slices), columns, rows, start, total, count, first, total_experts, moe)

    @property
    def is_expert(self) -> bool:
        """True for layers of routed experts."""
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
    def is_head(self) -> bool:
        """True for a scalar head."""
        return self.slices[0].name == HEAD

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """Key that is equal for target modules whose factors have the same shapes and sharding."""
        # By projection, too: StackedAdapters takes the row blocks of a group from its first target.
        names = tuple(fused_slice.name.rsplit(".", 1)[-1] for fused_slice in self.slices)
        return (self.rows, self.split, self.is_expert, self.experts, self.in_features, self.out_features, names)


@dataclass(frozen=True)
class RefusedTargets:
    """Modules that peft could adapt, and that are refused as targets here.

    Attributes:
        names: names of the modules in transformers' model.
        reason: reason of the refusal, and the setting to change.
        always: refuse a target that matches one of them even if it matches other layers too.
    """

    names: tuple[str, ...]
    reason: str
    always: bool


def refused_tower_targets(linear: Sequence[str], images: Images, trained: VisionTower) -> RefusedTargets:
    """Return the modules of a vision tower that are refused as targets.

    Args:
        linear: names of its linear layers.
    """
    not_linear = tuple(f"{images.tower}{name}" for name in images.not_linear)
    if trained == "train":
        reason = "no linear layer and not adapted: name the layers that are meant by more of their names (attn.proj)"
        return RefusedTargets(not_linear, reason, always=True)
    return RefusedTargets((*linear, *not_linear), "in the vision tower: set vision_tower: train", always=False)


class ModelLayout:
    """Mapping from Megatron's layers to Hugging Face names and this rank's rows."""

    def __init__(
        self, config: Any, topology: Topology, coordinates: Coordinates, tensor_names: Collection[str], vocab_size: int
    ) -> None:
        self.config, self.topology, self.coordinates, self.vocab_size = config, topology, coordinates, vocab_size
        architecture = architecture_named(config.hf_model_type)
        self.names = {architecture.model_name(name) for name in tensor_names}
        # Sorted: the order of a set of strings differs between processes.
        first = next((match for name in sorted(self.names) if (match := re.match(r"^(.*?)layers\.\d+\.", name))), None)
        self.prefix = first.group(1) if first else ""

    def name(self, number: int, *path: str) -> str:
        """Return the full name of a module in layer ``number`` (from 0), e.g. of ``name(2, "self_attn", "q_proj")``."""
        return ".".join([f"{self.prefix}layers.{number}", *path])

    def has(self, module: str) -> bool:
        """Check whether the checkpoint has a weight of a module."""
        return f"{module}.weight" in self.names or module in self.names

    def tensor_rank(self, *, expert: bool) -> tuple[int, int]:
        """Return (this rank, size) of the tensor parallel group of linear layers, of experts or outside them."""
        if expert:
            return self.coordinates.expert_tensor, self.topology.expert_tensor
        return self.coordinates.tensor, self.topology.tensor

    def vocab_shard(self, module: Any) -> VocabShard:
        """Return this rank's rows of an embedding or output layer, without padding."""
        return VocabShard.for_rank(self.vocab_size, module.weight.shape[0], self.coordinates.tensor, None)


def is_embedding(name: str) -> bool:
    """Check whether a projection is the embedding."""
    return name.split(".")[-1] == EMBEDDING


def is_output(name: str) -> bool:
    """Check whether a projection is the output layer."""
    return name.split(".")[-1] == OUTPUT


def matches(name: str, targets: Literal["all-linear"] | Sequence[str]) -> bool:
    """Check whether ``targets`` include the projection ``name``, in full or by its last components, as in peft.

    A scalar head is always included.
    """
    if name == HEAD:
        return True
    if targets == "all-linear":
        return not is_embedding(name) and not is_output(name)
    return any(name == target or name.endswith(f".{target}") for target in targets)


def check_untied(targets: Literal["all-linear"] | Sequence[str], prefix: str, *, tied: bool) -> None:
    """Raise ConfigError if ``targets`` name a weight that embedding and output layer share.

    Merging such an adapter would change both uses; peft warns of that. ``prefix``: of the embedding's name.
    """
    for name in (f"{prefix}{EMBEDDING}", OUTPUT):
        if tied and matches(name, targets):
            raise ConfigError(
                f"adapters.targets names {name!r}, but this model has one weight for {EMBEDDING} and {OUTPUT} "
                "(tie_word_embeddings): leave it out, or save the model untied first"
            )


def restrict(target: TargetModule, targets: Literal["all-linear"] | Sequence[str]) -> TargetModule | None:
    """Return ``target`` with only the targeted slices; None if no slice is targeted."""
    slices = tuple(fused_slice for fused_slice in target.slices if matches(fused_slice.name, targets))
    return replace(target, slices=slices) if slices else None


def weight_shape(module: Any) -> tuple[int, int]:
    """Return (output, input) features of a linear layer's weight on this rank; of an expert layer, of one expert's."""
    weight = module.weight0 if hasattr(module, "weight0") else module.weight
    return weight.shape[0], weight.shape[1]
