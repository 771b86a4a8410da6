"""Where adapters go: as in Llama, under this architecture's names."""

from __future__ import annotations

from megascend.training.lora.target_maps import linear, query_key_value


def layer_targets(layer, number, layout):
    attention, mlp = layer.self_attention, layer.mlp
    by_name = {name: layout.name(number, "ff", name) for name in ("gate_proj", "up_proj", "down_proj")}
    yield query_key_value(attention.linear_qkv, number, layout, folder="attn")
    yield linear(attention.linear_proj, "row", layout, [layout.name(number, "attn", "o_proj")])
    yield linear(mlp.linear_fc1, "column", layout, [by_name["gate_proj"], by_name["up_proj"]])
    yield linear(mlp.linear_fc2, "row", layout, [by_name["down_proj"]])
