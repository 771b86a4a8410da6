"""Qwen3-Next and Qwen3.5: three layers of linear attention (gated delta rule) to one of gated softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megascend.config.rules import Rule
from megascend.models.base import (
    ATTENTION_LAYERS,
    LINEAR,
    OTHER_ENGINE,
    Architecture,
    Config,
    Images,
    LinearAttention,
    expert_count,
)
from megascend.models.families.qwen3_vl import TINY_TOWER, with_tower

LINEAR_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # A first token's output is almost 0 where its query and key are almost orthogonal, and the norm after it amplifies rounding.
    "rms_norm_eps": 0.1,
}
"""Sizes of tiny models."""
DEFAULT_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""transformers' defaults for all of these models."""
IMAGES = Images(rotary_sections=(11, 11, 10))
TINY_LAYERS = [LINEAR, LINEAR, LINEAR, "full_attention"]


ROUTING = {"routed_scaling_factor": 1.0}
QWEN35_ROUTING = ROUTING | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Routing in transformers, which does not read these keys; mcore-bridge and this package do."""


@dataclass(frozen=True)
class QwenHybrid(Architecture):
    """Layers of linear attention by ``layer_types``, softmax attention with an output gate and partial rotary embeddings."""

    megatron: str | None = "megascend.models.families.qwen_hybrid_megatron"
    lora_targets: str | None = "megascend.training.lora.target_maps:layer_targets_of_hybrids"
    layer_kinds: tuple[str, ...] = (*ATTENTION_LAYERS, LINEAR)
    # Linear attention needs whole sequences: ranks exchange heads for them, by functions that older versions lack.
    context_core: str | None = "0.18"
    packages: tuple[str, ...] = ("fla.modules.convolution", "fla.ops.gated_delta_rule")
    prediction_head: bool = True
    prediction_layers: str = "mtp.layers"

    def normalise(self, config: Config) -> dict[str, Any]:
        # transformers leaves sizes that are its defaults out of the files that it writes.
        return DEFAULT_SIZES | super().normalise(config)

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        settings = super().megatron_settings(config) | {
            "qk_layernorm": True,
            # Norms of these families multiply by 1 + weight.
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
        }
        linear = LinearAttention.from_config(config)
        # mcore-bridge reads full_attention_interval alone, which transformers 5 replaces by the list.
        layers = [False] * config["num_hidden_layers"] if linear is None else linear.layers
        settings["linear_attention_freq"] = f"[{','.join(str(int(is_linear)) for is_linear in layers)}]"
        # No key of these configurations states the gate: transformers' code always has it.
        if expert_count(config):
            settings["moe_shared_expert_gate"] = True
        return settings

    rules = (
        *Architecture.rules,
        Rule(
            f"hidden_act with {{model_type}}: the convolutions of linear attention have kernels for silu only; {OTHER_ENGINE}",
            lambda s: s["hidden_act"] not in (None, "", "silu", "swish"),
        ),
        Rule(
            "linear_num_value_heads with linear_num_key_heads={linear_num_key_heads}: it is no multiple; correct config.json",
            lambda s: s["linear_num_value_heads"] % s["linear_num_key_heads"] > 0,
        ),
    )
    layout_rules = (
        Rule(
            # Value heads need no rule: each key head serves the same number of them. Context parallel ranks exchange heads for
            # whole sequences, and so divide them again.
            "parallel.tensor with parallel.context={context} and {linear_num_key_heads} key heads of linear attention: their "
            "product does not divide the heads; lower one of them",
            lambda s: (
                LinearAttention.from_config(s.config) is not None
                and s["linear_num_key_heads"] % (s.tensor * s.context) > 0
            ),
        ),
    )


@dataclass(frozen=True)
class Qwen35(QwenHybrid):
    """Qwen3.5 with its vision tower, which is Qwen3-VL's without features for inner layers."""

    images: Images | None = IMAGES
    text_type: str = "qwen3_5_text"

    def full_config(self, text: Config) -> dict[str, Any]:
        # Qwen3-VL feeds features of inner vision layers to the first decoder layers; Qwen3.5 does not.
        tower = {name: value for name, value in TINY_TOWER.items() if name != "deepstack_visual_indexes"}
        return with_tower(text, self.text_type, tower, rotated=0.5)


TINY = {"layer_types": TINY_LAYERS} | LINEAR_SIZES
TINY_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "router_aux_loss_coef": 0.0,
}
FAMILIES = (
    QwenHybrid(
        ("qwen3_next",),
        proven=True,
        model_class="Qwen3NextForCausalLM",
        fixed=ROUTING,
        tiny=TINY | TINY_EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Qwen35(
        ("qwen3_5",),
        proven_with_images=True,
        model_class="Qwen3_5ForConditionalGeneration",
        tiny=TINY,
    ),
    Qwen35(
        ("qwen3_5_moe",),
        proven_with_images=True,
        model_class="Qwen3_5MoeForConditionalGeneration",
        text_type="qwen3_5_moe_text",
        fixed=QWEN35_ROUTING,
        tiny=TINY | TINY_EXPERTS,
    ),
    QwenHybrid(
        ("qwen3_5_text",),
        proven=True,
        model_class="Qwen3_5ForCausalLM",
        tiny=TINY,
    ),
    QwenHybrid(
        ("qwen3_5_moe_text",),
        proven=True,
        model_class="Qwen3_5MoeForCausalLM",
        fixed=QWEN35_ROUTING,
        tiny=TINY | TINY_EXPERTS,
    ),
)
