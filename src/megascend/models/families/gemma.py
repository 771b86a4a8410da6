"""Gemma 4: alternating windows with heads of their own, per-layer embeddings, a router beside a dense MLP, capped logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascend.config.rules import Rule
from megascend.models.base import OTHER_ENGINE, Architecture, Config, ModelSetup
from megascend.models.families.decoders import window_settings

SLIDING, FULL = "sliding_attention", "full_attention"
TOWERS = (
    "model.vision_tower.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
"""Tensors of images and sound in the authors' checkpoints."""
ROPE_OF_LENGTH = ("dynamic", "longrope")


def global_sizes(config: Config) -> dict[str, Any]:
    """Return width and number of the key heads of layers with full attention.

    Authors have both as settings; transformers writes them as exceptions of single layers (``per_layer_config``).
    """
    kinds, exceptions = config.get("layer_types") or (), config.get("per_layer_config") or {}
    sizes = next((own for layer, own in exceptions.items() if kinds[int(layer)] == FULL), {})
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {
        "global_head_dim": sizes.get("head_dim") or config.get("global_head_dim") or config.get("head_dim"),
        "num_global_key_value_heads": sizes.get("num_key_value_heads") or heads or config.get("num_key_value_heads"),
    }


def _varies(setup: ModelSetup) -> bool:
    """Check for exceptions of single layers other than one width and number of heads for all layers with full attention."""
    exceptions = {int(layer): own for layer, own in (setup["per_layer_config"] or {}).items()}
    full = [layer for layer, kind in enumerate(setup["layer_types"] or ()) if kind == FULL]
    sizes = [exceptions.get(layer, {}) for layer in full]
    uneven = any(own != sizes[0] or own.keys() - {"head_dim", "num_key_value_heads"} for own in sizes)
    heads = setup["num_key_value_heads"], setup["num_global_key_value_heads"]
    return bool(exceptions.keys() - {*full}) or uneven or (heads[0] != heads[1] and not setup["attention_k_eq_v"])


@dataclass(frozen=True)
class Gemma4(Architecture):
    """Gemma 4's language model; the checkpoints' towers for images and sound are copied to exports as they are."""

    transformers: str | None = "megascend.models.families.gemma_transformers"
    megatron: str | None = "megascend.models.families.gemma_megatron"
    lora_targets: str | None = "megascend.training.lora.target_maps:layer_targets_of_gemma"
    # Weights and choice of experts come from norms that adapters would change, and peft takes routers for linear layers.
    without_adapters: tuple[str, ...] = ("router.proj",)
    copied: tuple[str, ...] = TOWERS

    def copies(self, name: str, config: Config) -> bool:
        # Authors' checkpoints have keys and values of layers that use others' too.
        layer = re.search(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name)
        shared = config.get("num_kv_shared_layers") or 0
        unused = bool(layer) and shared > 0 and int(layer[1]) >= config["num_hidden_layers"] - shared
        return super().copies(name, config) or unused

    def normalise(self, config: Config) -> dict[str, Any]:
        full = super().normalise(config)
        if not full.get("enable_moe_block"):
            full |= {"num_experts": None, "num_experts_per_tok": None}
        elif full.get("num_experts"):  # the dense MLP beside experts
            full |= {"shared_expert_intermediate_size": full.get("intermediate_size")}
        return full | global_sizes(full) if full.get("layer_types") else full

    def full_config(self, text: Config) -> dict[str, Any]:
        text = {name: value for name, value in text.items() if name not in ("rope_theta", "hidden_act")}
        outer = {name: text.pop(name) for name in ("model_type", "architectures") if name in text}
        outer |= {name: text[name] for name in ("tie_word_embeddings", "torch_dtype") if name in text}
        return outer | TINY_TOWERS[str(self.text_type)] | {"text_config": text | {"model_type": self.text_type}}

    def attention_width(self, config: Config) -> int:
        kinds = config.get("layer_types") or [FULL]
        widths = [global_sizes(config)["global_head_dim"] if kind == FULL else config["head_dim"] for kind in kinds]
        return config["num_attention_heads"] * sum(widths) // len(widths)

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        config = self.normalise(config)
        settings = super().megatron_settings(config) | window_settings(config)
        if config.get("num_experts"):
            settings |= {"moe_layer_freq": 1, "ffn_hidden_size": config["intermediate_size"]}
        else:
            settings |= {"num_moe_experts": None, "moe_ffn_hidden_size": None}
        return settings | {
            "qk_layernorm": True,
            # Norms of queries and keys have weights, and nothing else scales the scores.
            "softmax_scale": 1.0,
            "add_qkv_bias": False,
            # Checkpoints have no tensors of all layers together, whose sizes differ; Megatron-Core spells it so.
            "hetereogenous_dist_checkpoint": True,
        }

    def selfcheck_settings(self, config: Config, layers: int) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        kinds = config["layer_types"][:layers]
        if config.get("num_kv_shared_layers"):
            kinds = [*dict.fromkeys(config["layer_types"])] * 2
            settings = {"num_hidden_layers": len(kinds), "num_kv_shared_layers": len(kinds) // 2}
        sizes = global_sizes(config)
        heads, groups = config["num_attention_heads"], sizes["num_global_key_value_heads"]
        if heads >= 4:
            groups = 4 if groups == heads else min(groups, 2)
        own = {"head_dim": sizes["global_head_dim"], "num_key_value_heads": groups}
        exceptions = {str(layer): own for layer, kind in enumerate(kinds) if kind == FULL}
        return settings | {"layer_types": kinds, "per_layer_config": exceptions}

    rules = (
        *Architecture.rules,
        Rule(
            "num_kv_shared_layers with hidden_size_per_layer_input={hidden_size_per_layer_input}: mcore-bridge builds both or "
            f"neither; {OTHER_ENGINE}",
            lambda s: bool(s["num_kv_shared_layers"]) != bool(s["hidden_size_per_layer_input"]),
        ),
        Rule(
            "num_kv_shared_layers with num_hidden_layers={num_hidden_layers}: no layer computes keys; correct config.json",
            lambda s: (s["num_kv_shared_layers"] or 0) >= s["num_hidden_layers"],
        ),
        Rule(
            "vocab_size_per_layer_input with vocab_size={vocab_size}: mcore-bridge has one vocabulary; "
            f"{OTHER_ENGINE}",
            lambda s: (
                bool(s["hidden_size_per_layer_input"])
                and s["vocab_size_per_layer_input"] not in (None, s["vocab_size"])
            ),
        ),
        Rule(
            f"use_bidirectional_attention with {{model_type}}: attention of engine megatron is causal; {OTHER_ENGINE}",
            lambda s: s["use_bidirectional_attention"] == "all",
        ),
        Rule(
            "per_layer_config with {model_type}: layers of one kind differ, and mcore-bridge builds them alike; "
            f"{OTHER_ENGINE}",
            _varies,
        ),
        Rule(
            f"rope_parameters with {{model_type}}: rotary embeddings that depend on the length are not tested; {OTHER_ENGINE}",
            lambda s: any(
                section.get("rope_type") in ROPE_OF_LENGTH
                for section in (s["rope_parameters"] or {}).values()
                if isinstance(section, Mapping)
            ),
        ),
    )
    layout_rules = (
        Rule(
            "parallel.context with num_kv_shared_layers={num_kv_shared_layers}: no test covers it; set 1",
            lambda s: s.context > 1 and bool(s["num_kv_shared_layers"]),
        ),
        Rule(
            "parallel.tensor with {num_global_key_value_heads} key heads of full attention: it does not divide them; lower it",
            lambda s: s["num_global_key_value_heads"] % s.tensor > 0,
        ),
    )
    stage_rules = (
        Rule(
            "num_kv_shared_layers with stages of {chunk_layers} layers: keys and values do not reach other stages; set "
            "parallel.pipeline: 1",
            lambda s: len(s.chunk_layers) > 1 and bool(s["num_kv_shared_layers"]),
        ),
    )


TINY_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
TINY_TOKENS = {
    "boi_token_id": 309,
    "eoi_token_id": 310,
    "image_token_id": 314,
    "video_token_id": 315,
    "boa_token_id": 311,
    "eoa_token_index": 312,
    "audio_token_id": 313,
}
TINY_TOWERS = {
    "gemma4_text": TINY_TOKENS | {"vision_config": TINY_VISION},
    "gemma4_unified_text": TINY_TOKENS,
}
TINY = {
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": 16,
    "num_key_value_heads": 4,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": "vision",
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}
TINY_EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
FAMILIES = (
    Gemma4(
        ("gemma4",),
        proven=True,
        model_class="Gemma4ForConditionalGeneration",
        text_type="gemma4_text",
        fixed={"norm_topk_prob": True},
        tiny=TINY | TINY_EXPERTS,
    ),
    Gemma4(
        ("gemma4_unified",),
        proven=True,
        model_class="Gemma4UnifiedForConditionalGeneration",
        text_type="gemma4_unified_text",
        tiny=TINY,
    ),
)
"""Checkpoints of their language models alone have ``model_type: gemma4_text`` and ``gemma4_unified_text``."""
