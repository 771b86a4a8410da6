"""Qwen3-Next and Qwen3.5: three layers of linear attention (gated delta rule) to one of gated softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megascend.models.base import ATTENTION_LAYERS, Architecture, Config, expert_count

LINEAR = "linear_attention"
LINEAR_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Of tiny models."""
TINY_LAYERS = [LINEAR, LINEAR, LINEAR, "full_attention"]


@dataclass(frozen=True)
class QwenHybrid(Architecture):
    """Layers of linear attention by ``layer_types``, softmax attention with an output gate and partial rotary embeddings."""

    megatron: str | None = "megascend.models.qwen_hybrid_megatron"
    layer_kinds: tuple[str, ...] = (*ATTENTION_LAYERS, LINEAR)
    prediction_head: bool = True
    prediction_layers: str = "mtp.layers"

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        settings = super().megatron_settings(config) | {
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            # mcore-bridge reads full_attention_interval, which transformers 5 replaces by the list.
            "linear_attention_freq": f"[{','.join(str(int(kind == LINEAR)) for kind in layer_types(config))}]",
        }
        if expert_count(config):
            settings["moe_shared_expert_gate"] = True
        return settings


def layer_types(config: Config) -> list[str]:
    """List the kinds of the layers, from ``layer_types`` or the older ``full_attention_interval``."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    interval = config.get("full_attention_interval") or 4
    return [LINEAR if (layer + 1) % interval else "full_attention" for layer in range(config["num_hidden_layers"])]


FAMILIES = (
    QwenHybrid(
        ("qwen3_next",),
        model_class="Qwen3NextForCausalLM",
        tiny={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
            "layer_types": TINY_LAYERS,
        }
        | LINEAR_SIZES
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    ),
    QwenHybrid(
        ("qwen3_5_text",),
        model_class="Qwen3_5ForCausalLM",
        tiny={"layer_types": TINY_LAYERS} | LINEAR_SIZES,
    ),
    QwenHybrid(
        ("qwen3_5_moe_text",),
        model_class="Qwen3_5MoeForCausalLM",
        tiny={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "router_aux_loss_coef": 0.0,
            "layer_types": TINY_LAYERS,
        }
        | LINEAR_SIZES,
    ),
)
