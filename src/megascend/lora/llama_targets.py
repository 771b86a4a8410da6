"""The layers of architectures that name their modules as Llama does: Qwen, Mistral, Mixtral, GLM-4 and many others.

Its functions are of use to other architectures' maps as well, which may share the attention and have another MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from megascend.errors import ConfigError
from megascend.lora.target_modules import FusedSlice, ModelLayout, TargetModule, weight_shape


def layer_targets(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """The target modules of one transformer layer: attention, then a dense MLP or experts.

    Raises:
        ConfigError: it has attention or an MLP of another kind.
    """
    yield from attention(layer, number, layout)
    mlp = layer.mlp
    if hasattr(mlp, "experts"):
        yield from experts(mlp, number, layout)
        shared = getattr(mlp, "shared_experts", None)
        if shared is not None:
            yield from feed_forward(shared, number, layout, ("shared_expert", "shared_experts"))
    elif hasattr(mlp, "linear_fc1"):
        yield from feed_forward(mlp, number, layout)
    elif list(mlp.parameters()):
        raise ConfigError(f"adapters: layer {number} has {type(mlp).__name__}, {_unknown(layout)}")


def attention(layer: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """q, k and v, which Megatron fuses, and the output projection."""
    module: Any = getattr(layer, "self_attention", None)
    gated = getattr(layout.config, "attention_output_gate", False)  # the gate is inside q_proj
    if hasattr(module, "linear_qkv") and not gated:
        yield query_key_value(module.linear_qkv, number, layout)
        yield linear(module.linear_proj, "row", layout, [layout.name(number, "self_attn", "o_proj")])
    elif module is not None and list(module.parameters()):
        with_gate = " with an output gate" if gated else ""
        raise ConfigError(f"adapters: layer {number} has {type(module).__name__}{with_gate}, {_unknown(layout)}")


def _unknown(layout: ModelLayout) -> str:
    return (
        f"which the map of adapters' targets for model_type {layout.config.hf_model_type!r} does not know "
        "(megascend.register_lora_targets takes another)"
    )


def query_key_value(module: Any, number: int, layout: ModelLayout, folder: str = "self_attn") -> TargetModule:
    """Megatron's rows are, for every query group, its query heads, then its key, then its value.

    Args:
        folder: what the checkpoint calls a layer's attention.
    """
    config, (rank, size) = layout.config, layout.tensor_rank(expert=False)
    width = config.kv_channels
    groups = (config.num_query_groups or config.num_attention_heads) // size
    heads = config.num_attention_heads // (groups * size)
    rows = torch.arange(groups * (heads + 2) * width).view(groups, heads + 2, width)
    slices = []
    for name, chosen in (("q_proj", rows[:, :heads]), ("k_proj", rows[:, heads]), ("v_proj", rows[:, heads + 1])):
        local = chosen.flatten()
        whole = rank * len(local) + torch.arange(len(local))
        slices.append(FusedSlice(layout.name(number, folder, name), len(local) * size, local, whole))
    return TargetModule.of(module, "column", layout, slices)


def feed_forward(mlp: Any, number: int, layout: ModelLayout, folders: Sequence[str] = ()) -> Iterator[TargetModule]:
    """A dense MLP, or shared experts.

    Args:
        folders: names that the module of shared experts may have inside ``mlp``.
    """
    folder = next((f for f in folders if layout.has(layout.name(number, "mlp", f, "down_proj"))), None)
    path = ("mlp",) if folder is None else ("mlp", folder)
    names = [layout.name(number, *path, "gate_proj"), layout.name(number, *path, "up_proj")]
    if layout.has(layout.name(number, *path, "gate_up_proj")):
        names = [layout.name(number, *path, "gate_up_proj")]
    elif not layout.config.gated_linear_unit:
        names = [layout.name(number, *path, "up_proj")]
    yield linear(mlp.linear_fc1, "column", layout, names)
    yield linear(mlp.linear_fc2, "row", layout, [layout.name(number, *path, "down_proj")])


def experts(moe: Any, number: int, layout: ModelLayout) -> Iterator[TargetModule]:
    """transformers fuses the experts' weights, gate above up, into one parameter, and peft adapts that."""
    grouped = moe.experts
    if not hasattr(grouped.linear_fc1, "weight0") or not layout.config.gated_linear_unit:
        raise ConfigError(f"adapters: layer {number} has experts ({type(grouped).__name__}), {_unknown(layout)}")
    yield linear(grouped.linear_fc1, "column", layout, [layout.name(number, "mlp", "experts", "gate_up_proj")], moe)
    yield linear(grouped.linear_fc2, "row", layout, [layout.name(number, "mlp", "experts", "down_proj")], moe)


def linear(
    module: Any, split: Literal["column", "row"], layout: ModelLayout, names: Sequence[str], moe: Any = None
) -> TargetModule:
    """A layer whose output is one Hugging Face weight's, or that of gate and up, half each on every rank.

    Args:
        names: of the weight, or of gate and up. Under one name, a column parallel layer of a gated MLP is gate above up.
        moe: as for :meth:`TargetModule.of`.
    """
    out, _ = weight_shape(module)
    rank, size = layout.tensor_rank(expert=moe is not None)
    gated = split == "column" and layout.config.gated_linear_unit
    half = out // 2 if gated else out
    everything = torch.arange(out)
    if split == "row":
        slices = [FusedSlice(names[0], out, everything, everything)]
    elif len(names) == 2:
        local = torch.arange(half)
        whole = rank * half + local
        slices = [FusedSlice(name, half * size, local + which * half, whole) for which, name in enumerate(names)]
    elif gated:
        rows = torch.arange(half)
        whole = torch.cat([rank * half + rows, half * size + rank * half + rows])
        slices = [FusedSlice(names[0], out * size, everything, whole)]
    else:
        slices = [FusedSlice(names[0], out * size, everything, rank * out + everything)]
    return TargetModule.of(module, split, layout, slices, moe)
