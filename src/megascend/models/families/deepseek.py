"""DeepSeek-V2 and V3 and the models made like them (Kimi-K2, Moonlight, dots1): latent attention, shared experts, router bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascend.config.rules import Rule
from megascend.models.base import OTHER_ENGINE, Architecture, Config

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Attention of tiny models; ``head_dim`` is that of the rotated part, as transformers has it."""
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
"""Experts of tiny models."""
FIXED = {"rope_interleave": True, "moe_layer_freq": 1}
"""Settings of all families here."""


@dataclass(frozen=True)
class DeepSeek(Architecture):
    """A family with multi-head latent attention (MLA): queries, keys and values are projected through low-rank latents."""

    latent_norm_epsilon: float | None = 1e-6  # transformers and the authors' code leave their norm's default
    # mcore-bridge's latent attention rotates neighbouring features as pairs, and transformers has no period of expert layers.
    fixed: Mapping[str, Any] = field(default_factory=lambda: FIXED)

    rules = (
        *Architecture.rules,
        Rule(
            "v_head_dim with qk_nope_head_dim={qk_nope_head_dim} and qk_rope_head_dim={qk_rope_head_dim}: Megatron's attention "
            f"has no values wider than queries; {OTHER_ENGINE}",
            lambda s: bool(s["kv_lora_rank"]) and s["v_head_dim"] > s["qk_nope_head_dim"] + s["qk_rope_head_dim"],
        ),
    )


@dataclass(frozen=True)
class DeepSeekV2(DeepSeek):
    """DeepSeek-V2: softmax scores that are not renormalised after the choice, in the large models among the best groups."""

    megatron: str | None = "megascend.models.families.deepseek_megatron"
    fixed: Mapping[str, Any] = field(default_factory=lambda: FIXED | {"norm_topk_prob": False})

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        # Configurations that choose among all experts have these keys, too; the other kind of choice has a separate router.
        return super().megatron_settings(config) | {
            # transformers takes the softmax over all experts and then chooses; Megatron-Core's default is the softmax
            # of the chosen.
            "moe_router_pre_softmax": True,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
        }

    rules = (
        *DeepSeek.rules,
        Rule(
            f"topk_method with {{model_type}}: transformers has greedy and group_limited_greedy only; {OTHER_ENGINE}",
            lambda s: s["topk_method"] not in (None, "greedy", "group_limited_greedy"),
        ),
        Rule(
            "topk_method with topk_group={topk_group} and n_group={n_group}: the {experts} experts cannot be divided into "
            "equal groups; correct config.json",
            lambda s: (
                s["topk_method"] == "group_limited_greedy"
                and not (s["n_group"] and s["topk_group"] and s.experts % s["n_group"] == 0)
            ),
        ),
    )


@dataclass(frozen=True)
class DeepSeekV3(DeepSeek):
    """DeepSeek-V3: sigmoid scores, a correction bias for the choice, groups ranked by their two best experts."""

    fixed: Mapping[str, Any] = field(
        default_factory=lambda: FIXED | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    )


@dataclass(frozen=True)
class KimiK25(DeepSeekV3):
    """Kimi-K2.5, 2.6 and 2.7: DeepSeek-V3's model under ``language_model.``; their tower is copied to exports as it is."""

    def full_config(self, text: Config) -> dict[str, Any]:
        # transformers writes the text model without a tower under the authors' names only.
        text = {name: value for name, value in text.items() if name != "architectures"}
        outer = {"model_type": text.pop("model_type"), "architectures": ["KimiK25ForCausalLM"]}
        outer |= {name: text[name] for name in ("tie_word_embeddings", "torch_dtype") if name in text}
        return outer | TINY_TOWER | {"text_config": text | {"model_type": "deepseek_v3"}}


TINY_TOWER = {
    "projection_hidden_size": 32,
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "patch_size": 4,
    },
    "image_token_id": 314,
    "video_token_id": 315,
    "vision_start_token_id": 312,
    "vision_end_token_id": 313,
}
FAMILIES = (
    DeepSeekV2(
        ("deepseek_v2",),
        proven=True,
        model_class="DeepseekV2ForCausalLM",
        router="softmax",
        tiny=LATENT
        | EXPERTS
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "attention_bias": False},
    ),
    DeepSeekV3(
        ("deepseek_v3",),
        proven=True,
        model_class="DeepseekV3ForCausalLM",
        router="sigmoid",
        prediction_head=True,
        tiny=LATENT | EXPERTS | {"n_group": 2, "topk_group": 1, "attention_bias": False},
    ),
    DeepSeekV3(
        ("kimi_k2",),
        proven=True,
        transformers="megascend.models.families.kimi_transformers",
        model_class="DeepseekV3ForCausalLM",  # as its authors name it
        router="sigmoid",
        tiny=LATENT | EXPERTS | {"n_group": 1, "topk_group": 1, "attention_bias": False},
    ),
    KimiK25(
        ("kimi_k25",),
        proven=True,
        transformers="megascend.models.families.kimi_transformers",
        megatron="megascend.models.families.kimi_megatron",
        model_class="KimiK25ForConditionalGeneration",
        router="sigmoid",
        renamed=(("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")),
        copied=("vision_tower.", "mm_projector."),
        tiny=LATENT | EXPERTS | {"n_group": 1, "topk_group": 1, "attention_bias": False},
    ),
    DeepSeekV3(
        ("dots1",),
        proven=True,
        model_class="Dots1ForCausalLM",
        router="sigmoid",
        tiny=EXPERTS
        | {
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
            "max_window_layers": 4,
        },
    ),
)
