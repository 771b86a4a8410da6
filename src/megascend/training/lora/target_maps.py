"""Adapter targets in Megatron's layers: a registry with a map of one transformer layer for every architecture.

Architectures that name their modules as Llama does (Qwen, Mistral, Mixtral, GLM-4 and many others) share
:func:`layer_targets`, the default; :func:`register_lora_targets` adds others, whose maps may use the functions below it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megascend.errors import ConfigError
from megascend.models import architecture_named
from megascend.training.lora.target_modules import (
    EMBEDDING,
    OUTPUT,
    FusedSlice,
    ModelLayout,
    Split,
    TargetModule,
    weight_shape,
)

TargetMap = Callable[[Any, int, ModelLayout], Iterable[TargetModule]]
"""(Megatron's transformer layer, its number from 0, the layout) -> its target modules, in the model's order.

A map raises ConfigError for a kind of layer that it does not support. Factors are saved under ``FusedSlice.name``, so a map
defines an adapter's names in peft.
"""

_by_model_type: dict[str, TargetMap] = {}


def register_lora_targets(model_type: str, target_map: TargetMap) -> None:
    """Register the adapter targets of an architecture, on every rank, before a backend is constructed.

    Args:
        model_type: as in the model's ``config.json``.

    Raises:
        ConfigError: another map is registered for it.
    """
    if _by_model_type.setdefault(model_type, target_map) is not target_map:
        raise ConfigError(f"register_lora_targets: another map is registered for model_type {model_type!r}")


def find_target_modules(chunks: Sequence[Any], layout: ModelLayout) -> list[TargetModule]:
    """Return every layer of this rank's chunks that an adapter could act on, in the model's order."""
    targets_of_layer = _target_map(layout.config.hf_model_type)
    excluded = architecture_named(layout.config.hf_model_type).without_adapters
    targets: list[TargetModule] = []
    for chunk in chunks:
        tied = chunk.share_embeddings_and_output_weights
        # Weights that are tied have no adapters: see check_untied.
        if chunk.pre_process and not tied:
            targets += _embedding(chunk.embedding, layout)
        for layer in chunk.decoder.layers:
            candidates = targets_of_layer(layer, layer.layer_number - 1, layout)
            targets += [target for target in candidates if not excluded or not target.slices[0].name.endswith(excluded)]
        if chunk.post_process and not tied:
            targets += _output(chunk.output_layer, layout)
    return targets


def _target_map(model_type: str) -> TargetMap:
    """Return the map that was registered, the one that the architecture declares, or that of plain decoders."""
    architecture = architecture_named(model_type)
    if model_type in _by_model_type or architecture.lora_targets is None:
        return _by_model_type.get(model_type, layer_targets)
    module, _, name = architecture.lora_targets.partition(":")
    return getattr(architecture.import_module(module), name)


def _embedding(embedding: Any, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the embedding as a row parallel layer of one-hot inputs: A is split by vocabulary, B is the same on all ranks."""
    name, module = f"{layout.prefix}{EMBEDDING}", embedding.word_embeddings
    sliced = layout.topology.sequence_parallel and layout.topology.tensor > 1
    # With learned positions Megatron slices the sequence after adding them, so B would get the full sequence on every rank.
    if not layout.has(name) or (sliced and not module.reduce_scatter_embeddings):
        return
    shard, columns = layout.vocab_shard(module), torch.arange(module.weight.shape[1])
    weight = FusedSlice(name, len(columns), columns, columns)
    yield TargetModule(module, "row", (weight,), shard.rows, len(columns), shard.start, layout.vocab_size)


def _output(module: Any, layout: ModelLayout) -> Iterator[TargetModule]:
    if not layout.has(OUTPUT):
        return
    shard, columns = layout.vocab_shard(module), module.weight.shape[1]
    rows = torch.arange(shard.rows)
    weight = FusedSlice(OUTPUT, layout.vocab_size, rows, shard.start + rows)
    yield TargetModule(module, "column", (weight,), columns, shard.rows, 0, columns)


def layer_targets(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the target modules of a layer with Llama's names: attention, then a dense MLP or experts."""
    yield from attention(layer, number, layout)
    yield from layer_mlp(layer, number, layout)


def layer_mlp(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the target modules of a layer's dense MLP or experts."""
    mlp = layer.mlp
    if hasattr(mlp, "experts"):
        yield from experts(mlp, number, layout)
        shared = getattr(mlp, "shared_experts", None)
        if shared is not None:
            yield from feed_forward(shared, number, layout, ("shared_expert", "shared_experts"))
    elif hasattr(mlp, "linear_fc1"):
        yield from feed_forward(mlp, number, layout)
    # A layer may have no MLP; one of an unknown kind must not be left out silently.
    elif list(mlp.parameters()):
        raise ConfigError(f"adapters: layer {number} has {type(mlp).__name__}, {_unknown(layout)}")


def attention(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield q, k and v, which Megatron fuses, or the projections of latent attention, and the output projection."""
    module: Any = getattr(layer, "self_attention", None)
    if hasattr(module, "linear_kv_down_proj"):
        yield from latent_attention(module, number, layout)
        return
    gated = getattr(layout.config, "attention_output_gate", False)
    if hasattr(module, "linear_qkv") and not gated:
        yield query_key_value(module.linear_qkv, number, layout)
        yield linear(module.linear_proj, "row", layout, [layout.name(number, "self_attn", "o_proj")])
    elif module is not None and list(module.parameters()):
        with_gate = " with an output gate" if gated else ""
        raise ConfigError(f"adapters: layer {number} has {type(module).__name__}{with_gate}, {_unknown(layout)}")


def _unknown(layout: ModelLayout) -> str:
    return (
        f"which the map of adapters' targets for model_type {layout.config.hf_model_type!r} does not "
        "support (megascend.register_lora_targets registers another)"
    )


def latent_attention(
    module: Any, number: int, layout: ModelLayout, folder: str = "self_attn"
) -> Iterator[TargetModule]:
    """Yield the projections of multi-head latent attention: those into the latents are whole on every rank."""

    def target(layer: Any, split: Split, name: str) -> TargetModule:
        rows, _ = weight_shape(layer)
        local = torch.arange(rows)
        rank, size = layout.tensor_rank(expert=False) if split == "column" else (0, 1)
        weight = FusedSlice(layout.name(number, folder, name), rows * size, local, rank * rows + local)
        return TargetModule.of(layer, split, layout, [weight])

    if layout.config.q_lora_rank is None:
        yield target(module.linear_q_proj, "column", "q_proj")
    else:
        yield target(module.linear_q_down_proj, "none", "q_a_proj")
        yield target(module.linear_q_up_proj, "column", "q_b_proj")
    yield target(module.linear_kv_down_proj, "none", "kv_a_proj_with_mqa")
    yield target(module.linear_kv_up_proj, "column", "kv_b_proj")
    yield target(module.linear_proj, "row", "o_proj")


def query_key_value(
    module: Any,
    number: int,
    layout: ModelLayout,
    folder: str = "self_attn",
    *,
    gated: bool = False,
    width: int | None = None,
    groups: int | None = None,
    shared: Sequence[str] = ("k_proj", "v_proj"),
) -> TargetModule:
    """Build the fused projection: query heads, key and value of each query group.

    Args:
        folder: the attention's name.
        gated: ``q_proj`` has the output gate of each head after its query.
        width, groups, shared: width of a head, query groups of this rank, and names of what they share, of layers that differ.
    """
    config, (rank, size) = layout.config, layout.tensor_rank(expert=False)
    width = int(width or config.kv_channels)
    groups = int(groups or (config.num_query_groups or config.num_attention_heads) // size)
    heads = config.num_attention_heads // (groups * size)
    heads *= 2 if gated else 1
    # Megatron's order within a query group: its query heads, its key, its value.
    rows = torch.arange(groups * (heads + len(shared)) * width).view(groups, heads + len(shared), width)
    slices = []
    for name, part in (("q_proj", rows[:, :heads]), *((name, rows[:, heads + i]) for i, name in enumerate(shared))):
        local = part.flatten()
        global_rows = rank * len(local) + torch.arange(len(local))
        slices.append(FusedSlice(layout.name(number, folder, name), len(local) * size, local, global_rows))
    return TargetModule.of(module, "column", layout, slices)


def feed_forward(mlp: Any, number: int, layout: ModelLayout, folders: Sequence[str] = ()) -> Iterator[TargetModule]:
    """Yield a dense MLP, or shared experts, whose module may be called one of ``folders`` inside ``mlp``."""
    # Architectures differ in the folder's name; the checkpoint shows which it is.
    folder = next((f for f in folders if layout.has(layout.name(number, "mlp", f, "down_proj"))), None)
    path = ("mlp",) if folder is None else ("mlp", folder)
    names = [layout.name(number, *path, "gate_proj"), layout.name(number, *path, "up_proj")]
    if layout.has(layout.name(number, *path, "gate_up_proj")):
        names = [layout.name(number, *path, "gate_up_proj")]
    elif not layout.config.gated_linear_unit:
        names = [layout.name(number, *path, "up_proj")]
    yield linear(mlp.linear_fc1, "column", layout, names)
    yield linear(mlp.linear_fc2, "row", layout, [layout.name(number, *path, "down_proj")])


def layer_targets_of_interleaved_experts(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the target modules of a layer whose fused experts have rows of gate and up in turn (gpt-oss)."""
    for target in layer_targets(layer, number, layout):
        weight = target.slices[0]
        if not weight.name.endswith(".experts.gate_up_proj"):
            yield target
            continue
        half = weight.out_features // 2  # Megatron's rows are gate's above up's
        rows = torch.where(weight.global_rows < half, 2 * weight.global_rows, 2 * (weight.global_rows - half) + 1)
        yield replace(target, slices=(replace(weight, global_rows=rows),))


def layer_targets_of_hybrids(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the target modules of a layer that has linear attention (gated delta net) or gated softmax attention."""
    module = layer.self_attention
    if hasattr(module, "conv1d"):
        yield linear_attention(module, number, layout)
        yield linear(module.out_proj, "row", layout, [layout.name(number, "linear_attn", "out_proj")])
    else:
        yield query_key_value(module.linear_qkv, number, layout, gated=True)
        yield linear(module.linear_proj, "row", layout, [layout.name(number, "self_attn", "o_proj")])
    yield from layer_mlp(layer, number, layout)


def layer_targets_of_single_mixers(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the target modules of a layer of Nemotron-H: its ``mixer`` is a state space, attention, an MLP or experts."""

    def target(module: Any, split: Split, *path: str) -> TargetModule:
        return linear(module, split, layout, [layout.name(number, "mixer", *path)])

    if hasattr(layer, "mixer"):
        yield state_space_input(layer.mixer, number, layout)
    elif hasattr(layer.self_attention, "linear_qkv"):
        yield query_key_value(layer.self_attention.linear_qkv, number, layout, "mixer")
        yield target(layer.self_attention.linear_proj, "row", "o_proj")
    else:
        mlp, path = layer.mlp, []
        if hasattr(mlp, "experts"):
            if layout.config.moe_latent_size:
                for name in ("fc1_latent_proj", "fc2_latent_proj"):
                    rows = torch.arange(weight_shape(getattr(mlp, name))[0])
                    weight = FusedSlice(layout.name(number, "mixer", name), len(rows), rows, rows)
                    yield TargetModule.of(getattr(mlp, name), "none", layout, [weight])
            mlp, path = mlp.shared_experts, ["shared_experts"]
        yield target(mlp.linear_fc1, "column", *path, "up_proj")
        yield target(mlp.linear_fc2, "row", *path, "down_proj")


def state_space_input(mixer: Any, number: int, layout: ModelLayout) -> TargetModule:
    """Build the input projection of a state space, of which each rank has a part of gate, input, B, C and steps."""
    rank, size = layout.tensor_rank(expert=False)
    blocks = mixer.in_proj.weight.partition_sizes
    starts = [size * start for start in itertools.accumulate(blocks, initial=0)]
    rows = torch.cat([start + rank * width + torch.arange(width) for start, width in zip(starts, blocks, strict=False)])
    weight = FusedSlice(layout.name(number, "mixer", "in_proj"), len(rows) * size, torch.arange(len(rows)), rows)
    return TargetModule.of(mixer.in_proj, "column", layout, [weight])


def linear_attention(module: Any, number: int, layout: ModelLayout, folder: str = "linear_attn") -> TargetModule:
    """Build the fused input projection of a gated delta net, of which checkpoints have two parts or four.

    Megatron's rows are those of one key head after another: its query and key, then the values, gates (z), strengths (b) and
    decays (a) of its value heads. Qwen3-Next's checkpoints keep that order in ``in_proj_qkvz`` and ``in_proj_ba``; Qwen3.5's
    ``in_proj_qkv`` has all queries, then all keys, then all values.
    """
    config, (rank, size) = layout.config, layout.tensor_rank(expert=False)
    key, heads = config.linear_key_head_dim, config.linear_num_key_heads
    value_heads = config.linear_num_value_heads // heads
    value = value_heads * config.linear_value_head_dim
    widths = (key, key, value, value, value_heads, value_heads)
    local_heads = heads // size
    rows = torch.arange(local_heads * sum(widths)).view(local_heads, -1)
    q, k, v, z, b, a = rows.split(widths, dim=1)
    if layout.has(layout.name(number, folder, "in_proj_qkvz")):
        parts = {"in_proj_qkvz": [torch.cat([q, k, v, z], dim=1)], "in_proj_ba": [torch.cat([b, a], dim=1)]}
    else:
        parts = {"in_proj_qkv": [q, k, v], "in_proj_z": [z], "in_proj_b": [b], "in_proj_a": [a]}
    slices = []
    for name, blocks in parts.items():
        starts = [0, *itertools.accumulate(heads * block.shape[1] for block in blocks)]
        global_rows = [
            start + rank * block.numel() + torch.arange(block.numel())
            for start, block in zip(starts, blocks, strict=False)
        ]
        local_rows, order = torch.cat([block.flatten() for block in blocks]).sort()
        weight = FusedSlice(layout.name(number, folder, name), starts[-1], local_rows, torch.cat(global_rows)[order])
        slices.append(weight)
    return TargetModule.of(module.in_proj, "column", layout, slices)


def layer_targets_of_gemma(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """Yield the target modules of a layer of Gemma 4: experts are beside a dense MLP, and kinds of layers have other heads."""
    attention = layer.self_attention
    yield query_key_value(
        attention.linear_qkv,
        number,
        layout,
        width=attention.hidden_size_per_attention_head,
        groups=attention.num_query_groups_per_partition,
        shared=[name for name in ("k_proj", "v_proj") if layout.has(layout.name(number, "self_attn", name))],
    )
    yield linear(attention.linear_proj, "row", layout, [layout.name(number, "self_attn", "o_proj")])
    yield from feed_forward(layer.mlp, number, layout)
    if hasattr(layer, "experts_mlp"):
        yield from experts(layer.experts_mlp, number, layout, "experts")


def experts(moe: Any, number: int, layout: ModelLayout, *path: str) -> Iterator[TargetModule]:
    """Yield experts as transformers fuses them and peft adapts them: gate above up in one parameter, and down.

    ``path``: their name in a layer, where it is not ``mlp.experts``.
    """
    path = path or ("mlp", "experts")
    grouped = moe.experts
    if not hasattr(grouped.linear_fc1, "weight0") or not layout.config.gated_linear_unit:
        raise ConfigError(f"adapters: layer {number} has experts ({type(grouped).__name__}), {_unknown(layout)}")
    yield linear(grouped.linear_fc1, "column", layout, [layout.name(number, *path, "gate_up_proj")], moe)
    yield linear(grouped.linear_fc2, "row", layout, [layout.name(number, *path, "down_proj")], moe)


def linear(module: Any, split: Split, layout: ModelLayout, names: Sequence[str], moe: Any = None) -> TargetModule:
    """Build the target for a layer of one Hugging Face weight, or of gate and up, half and half on every rank.

    ``names``: of the weight, or of gate and up. With one name, a column parallel layer of a gated MLP is gate above up.
    """
    out, _ = weight_shape(module)
    rank, size = layout.tensor_rank(expert=moe is not None)
    gated = split == "column" and layout.config.gated_linear_unit
    half = out // 2 if gated else out
    all_rows = torch.arange(out)
    # Tensor parallel ranks divide the input, so each has all output rows.
    if split == "row":
        slices = [FusedSlice(names[0], out, all_rows, all_rows)]
    elif len(names) == 2:
        # Each rank has a part of gate above a part of up, not consecutive rows of the two together.
        local = torch.arange(half)
        global_rows = rank * half + local
        slices = [FusedSlice(name, half * size, local + index * half, global_rows) for index, name in enumerate(names)]
    elif gated:
        rows = torch.arange(half)
        global_rows = torch.cat([rank * half + rows, half * size + rank * half + rows])
        slices = [FusedSlice(names[0], out * size, all_rows, global_rows)]
    else:
        slices = [FusedSlice(names[0], out * size, all_rows, rank * out + all_rows)]
    return TargetModule.of(module, split, layout, slices, moe)
