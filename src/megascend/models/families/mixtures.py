"""Decoders with experts of other houses: MiniMax-M2, Hunyuan-3, ERNIE 4.5 and gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megascend.models.base import Architecture, Config
from megascend.models.families.decoders import MIXTRAL_NAMES


@dataclass(frozen=True)
class MiniMaxM2(Architecture):
    """MiniMax-M2: norms over all queries and all keys, partial rotary embeddings, DeepSeek-V3's router without groups."""

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        return super().megatron_settings(config) | {"qk_layernorm": True}


@dataclass(frozen=True)
class Hunyuan3(Architecture):
    """Hunyuan-3: norms of each query and key head, DeepSeek-V3's router without groups, a first dense layer."""

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        return super().megatron_settings(config) | {"qk_layernorm": True}


@dataclass(frozen=True)
class Ernie45Moe(Architecture):
    """ERNIE 4.5 with experts: softmax scores with a correction bias for the choice, normalised after it."""

    megatron: str | None = "megascend.models.families.ernie_megatron"

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        # Its router is one of its own; Megatron-Core's does not weigh one expert by a softmax over the chosen.
        return super().megatron_settings(config) | {"moe_router_pre_softmax": True}


FAMILIES = (
    MiniMaxM2(
        ("minimax_m2",),
        proven=True,
        renamed=MIXTRAL_NAMES,
        model_class="MiniMaxM2ForCausalLM",
        fixed={"use_qk_norm": True, "router_jitter_noise": 0.0, "norm_topk_prob": True, "scoring_func": "sigmoid"},
        router="sigmoid",
        tiny={
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "partial_rotary_factor": 0.5,
            "rotary_dim": 8,
        },
    ),
    Hunyuan3(
        ("hy_v3",),
        proven=True,
        renamed=((".shared_mlp.", ".shared_experts."), (".router.gate.", ".gate.")),
        model_class="HYV3ForCausalLM",
        fixed={"norm_topk_prob": True},
        router="sigmoid",
        tiny={
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    Architecture(("ernie4_5",), proven=True, model_class="Ernie4_5ForCausalLM", tiny={"use_bias": False}),
    Ernie45Moe(
        ("ernie4_5_moe",),
        proven=True,
        model_class="Ernie4_5_MoeForCausalLM",
        tiny={
            "use_bias": False,
            "moe_intermediate_size": 32,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    Architecture(
        ("gpt_oss",),
        proven=True,
        model_class="GptOssForCausalLM",
        biases="all",
        lora_targets="megascend.training.lora.target_maps:layer_targets_of_interleaved_experts",
        interleaved_experts=True,
        fixed={"swiglu_alpha": 1.702, "norm_topk_prob": True, "attention_bias": True},
        passed={"activation_func_clamp_value": "swiglu_limit"},
        tiny={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
)
