"""Where adapters can go: which Hugging Face weights lie in which Megatron linear layer, and on which rank's rows.

Megatron fuses what Hugging Face keeps apart (q, k and v; gate and up). An adapter is defined on the Hugging Face side,
as peft has it, so a fused layer has several slices, each with factors of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
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
    """One Megatron layer that adapters act on: a linear layer, or the embedding, which is one of one-hot inputs.

    Attributes:
        module: the layer.
        split: ``column`` if tensor parallel ranks share its output (the output layer's is the vocabulary), ``row`` if they
            share its input (the embedding's is).
        slices: the Hugging Face weights in it, at least one.
        in_features, out_features: of this rank; rows that pad a vocabulary do not count.
        in_start, in_total: this rank's first input column, and the whole weight's columns.
        experts, expert_start, expert_total: experts of this rank, the first one's number, and of the model; 1, 0 and None
            where the layer is no expert layer.
        moe: the mixture-of-experts layer around it, or None.
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

    def layer(self, number: int, *path: str) -> str:
        """Full name of a module in layer ``number`` (from 0)."""
        return ".".join([f"{self.prefix}layers.{number}", *path])

    def has(self, module: str) -> bool:
        """True if the checkpoint has a weight of that module."""
        return f"{module}.weight" in self.names or module in self.names

    def shard(self, module: Any) -> VocabShard:
        """The rows of an embedding or output layer on this rank, without padding."""
        return VocabShard.of_rank(self.vocab_size, module.weight.shape[0], self.place.tensor, None)


def find_target_modules(chunks: Sequence[Any], layout: ModelLayout) -> list[TargetModule]:
    """Every layer of this rank's chunks that an adapter could act on, in the model's order.

    Raises:
        ConfigError: the architecture has attention or MLP layers of a kind that adapters do not know.
    """
    if layout.config.multi_latent_attention or getattr(layout.config, "attention_output_gate", False):
        raise ConfigError(
            f"adapters: {layout.config.hf_model_type} has attention layers that megascend's adapters do not know "
            "(multi-latent attention, or an output gate inside q_proj)"
        )
    target_modules: list[TargetModule] = []
    for chunk in chunks:
        tied = chunk.share_embeddings_and_output_weights
        if chunk.pre_process and not tied:
            target_modules += _embedding(chunk.embedding, layout)
        for layer in chunk.decoder.layers:
            target_modules += _of_layer(layer, layer.layer_number - 1, layout)
        if chunk.post_process and not tied:
            target_modules += _output(chunk.output_layer, layout)
    return target_modules


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


def check_untied(targets: Literal["all-linear"] | Sequence[str], layout: ModelLayout) -> None:
    """Raise ConfigError if ``targets`` name a weight that embedding and output layer have in common.

    peft warns of such adapters: each acts on one use of the weight, so that merging either changes both.
    """
    for name in (f"{layout.prefix}{EMBEDDING}", OUTPUT):
        if not layout.config.untie_embeddings_and_output_weights and matches(name, targets):
            raise ConfigError(
                f"adapters.targets names {name!r}, but this model has one weight for {EMBEDDING} and {OUTPUT} "
                "(tie_word_embeddings): an adapter merged into one would change the other. Save the model untied first: load "
                f"it in transformers with tie_word_embeddings=False, copy {EMBEDDING}'s weight to {OUTPUT}, save_pretrained()"
            )


def restrict(target: TargetModule, targets: Literal["all-linear"] | Sequence[str]) -> TargetModule | None:
    """``target`` with only the targeted slices, or None if there are none."""
    kept = tuple(fused_slice for fused_slice in target.slices if matches(fused_slice.name, targets))
    return replace(target, slices=kept) if kept else None


def _embedding(embedding: Any, layout: ModelLayout) -> Iterator[TargetModule]:
    """Its A looks columns of the vocabulary up, where B is whole on every rank: a row parallel layer of one-hot inputs."""
    name, module = f"{layout.prefix}{EMBEDDING}", embedding.word_embeddings
    sliced = layout.topology.sequence_parallel and layout.topology.tensor > 1
    # With learned positions Megatron slices the sequence after adding them, so that B would see all of it on every rank.
    if not layout.has(name) or (sliced and not module.reduce_scatter_embeddings):
        return
    shard, everything = layout.shard(module), torch.arange(module.weight.shape[1])
    whole = FusedSlice(name, len(everything), everything, everything)
    yield TargetModule(module, "row", (whole,), shard.rows, len(everything), shard.start, layout.vocab_size)


def _output(module: Any, layout: ModelLayout) -> Iterator[TargetModule]:
    if not layout.has(OUTPUT):
        return
    shard, columns = layout.shard(module), module.weight.shape[1]
    rows = torch.arange(shard.rows)
    yield TargetModule(
        module,
        "column",
        (FusedSlice(OUTPUT, layout.vocab_size, rows, shard.start + rows),),
        columns,
        shard.rows,
        0,
        columns,
    )


def _of_layer(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    attention: Any = getattr(layer, "self_attention", None)
    if hasattr(attention, "linear_qkv"):
        yield _qkv(attention.linear_qkv, layout, number)
        yield _one(attention.linear_proj, "row", layout, [layout.layer(number, "self_attn", "o_proj")])
    elif attention is not None and list(attention.parameters()):
        raise ConfigError(
            f"adapters: layer {number} has {type(attention).__name__}, which megascend's adapters do not know"
        )
    mlp = layer.mlp
    if hasattr(mlp, "experts"):
        yield from _experts(mlp, layout, number)
        shared = getattr(mlp, "shared_experts", None)
        if shared is not None:
            yield from _mlp(shared, layout, number, ("shared_expert", "shared_experts"))
    elif hasattr(mlp, "linear_fc1"):
        yield from _mlp(mlp, layout, number, ())
    elif list(mlp.parameters()):
        raise ConfigError(f"adapters: layer {number} has {type(mlp).__name__}, which megascend's adapters do not know")


def _qkv(module: Any, layout: ModelLayout, number: int) -> TargetModule:
    """Megatron's rows are, for every query group, its query heads, then its key, then its value."""
    config, tp = layout.config, layout.topology.tensor
    size = config.kv_channels
    groups = (config.num_query_groups or config.num_attention_heads) // tp
    heads = config.num_attention_heads // (groups * tp)
    rows = torch.arange(groups * (heads + 2) * size).view(groups, heads + 2, size)
    slices = []
    for name, chosen in (("q_proj", rows[:, :heads]), ("k_proj", rows[:, heads]), ("v_proj", rows[:, heads + 1])):
        local = chosen.flatten()
        slices.append(
            FusedSlice(
                layout.layer(number, "self_attn", name),
                len(local) * tp,
                local,
                layout.place.tensor * len(local) + torch.arange(len(local)),
            )
        )
    if not all(layout.has(each.name) for each in slices):
        raise ConfigError(f"adapters: the checkpoint has no {slices[0].name}.weight (and k_proj, v_proj) to adapt")
    return _target_module(module, "column", layout, slices)


def _mlp(mlp: Any, layout: ModelLayout, number: int, folders: tuple[str, ...]) -> Iterator[TargetModule]:
    folder = next((f for f in folders if layout.has(layout.layer(number, "mlp", f, "down_proj"))), None)
    path = ("mlp",) if folder is None else ("mlp", folder)
    names = [layout.layer(number, *path, "gate_proj"), layout.layer(number, *path, "up_proj")]
    if layout.has(layout.layer(number, *path, "gate_up_proj")):
        names = [layout.layer(number, *path, "gate_up_proj")]
    elif not layout.config.gated_linear_unit:
        names = [layout.layer(number, *path, "up_proj")]
    yield _one(mlp.linear_fc1, "column", layout, names)
    yield _one(mlp.linear_fc2, "row", layout, [layout.layer(number, *path, "down_proj")])


def _experts(moe: Any, layout: ModelLayout, number: int) -> Iterator[TargetModule]:
    """transformers fuses the experts' weights, gate above up, into one parameter, and peft adapts that."""
    experts = moe.experts
    if not hasattr(experts.linear_fc1, "weight0") or not layout.config.gated_linear_unit:
        raise ConfigError(f"adapters: layer {number} has experts ({type(experts).__name__}) that adapters do not know")
    yield _one(experts.linear_fc1, "column", layout, [layout.layer(number, "mlp", "experts", "gate_up_proj")], moe)
    yield _one(experts.linear_fc2, "row", layout, [layout.layer(number, "mlp", "experts", "down_proj")], moe)


def _one(
    module: Any, split: Literal["column", "row"], layout: ModelLayout, names: list[str], moe: Any = None
) -> TargetModule:
    """A layer whose output is one Hugging Face weight's, or that of gate and up, half each on every rank."""
    out, _ = _shape(module)
    size = layout.topology.expert_tensor if moe is not None else layout.topology.tensor
    rank = layout.place.expert_tensor if moe is not None else layout.place.tensor
    gated = split == "column" and layout.config.gated_linear_unit
    half = out // 2 if gated else out
    everything = torch.arange(out)
    if split == "row":
        slices = [FusedSlice(names[0], out, everything, everything)]
    elif len(names) == 2:
        local = torch.arange(half)
        slices = [
            FusedSlice(name, half * size, local + which * half, rank * half + local) for which, name in enumerate(names)
        ]
    elif gated:
        rows = torch.arange(half)
        whole = torch.cat([rank * half + rows, half * size + rank * half + rows])
        slices = [FusedSlice(names[0], out * size, everything, whole)]
    else:
        slices = [FusedSlice(names[0], out * size, everything, rank * out + everything)]
    missing = [each.name for each in slices if moe is None and not layout.has(each.name)]
    if missing:
        raise ConfigError(f"adapters: the checkpoint has no {missing[0]}.weight, which Megatron's layer is made of")
    return _target_module(module, split, layout, slices, moe)


def _target_module(
    module: Any, split: Literal["column", "row"], layout: ModelLayout, slices: list[FusedSlice], moe: Any = None
) -> TargetModule:
    out, columns = _shape(module)
    expert = moe is not None
    size = layout.topology.expert_tensor if expert else layout.topology.tensor
    rank = layout.place.expert_tensor if expert else layout.place.tensor
    total = columns * size if split == "row" else columns
    start = rank * columns if split == "row" else 0
    if not expert:
        return TargetModule(module, split, tuple(slices), columns, out, start, total)
    count = layout.config.num_moe_experts // layout.topology.expert
    return TargetModule(
        module,
        split,
        tuple(slices),
        columns,
        out,
        start,
        total,
        experts=count,
        expert_start=layout.place.expert * count,
        expert_total=layout.config.num_moe_experts,
        moe=moe,
    )


def _shape(module: Any) -> tuple[int, int]:
    """(output, input) features of this rank's weight."""
    weight = module.weight0 if hasattr(module, "weight0") else module.weight
    return weight.shape[0], weight.shape[1]
