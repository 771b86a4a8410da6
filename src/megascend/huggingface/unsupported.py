"""Find settings of a model's configuration that its Megatron counterpart does not support. Pure.

Without these checks such a setting would fail late and with another message: a missing or unexpected tensor, or an assertion of
Megatron-Core. Settings that change numbers without an error are left to the self-check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

BIAS_WITHOUT_OUTPUT = ("qwen2", "qwen2_moe", "glm4", "glm4_moe")
"""Architectures whose ``attention_bias`` means q, k and v only."""

WHOLE_BIAS = ("gpt_oss",)
"""Architectures whose linear layers all have biases, also in Megatron."""

KNOWN_LAYERS = ("full_attention", "sliding_attention", "attention")

OTHER_MODEL = "train another checkpoint, or keep to transformers for this one"


def unsupported_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a model cannot be trained here, from its full configuration (``to_dict()``)."""
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    # All reasons, so that a user does not correct one setting after the other.
    return [reason for look in LOOKS if (reason := look(config)) is not None]


def attention_bias(config: Mapping[str, Any]) -> str | None:
    """Check biases of attention: Megatron has them on q, k and v alone, or on all linear layers of the model."""
    kind = config.get("model_type")
    name = next((name for name in ("attention_bias", "use_bias") if config.get(name)), None)
    if name is None or kind in BIAS_WITHOUT_OUTPUT or kind in WHOLE_BIAS:
        return None
    return (
        f"{name}: true gives every linear layer of {kind}'s attention a bias, o_proj included; the Megatron model has biases on "
        f"q, k and v alone and would lose o_proj's; {OTHER_MODEL}"
    )


def mlp_bias(config: Mapping[str, Any]) -> str | None:
    """Check biases of MLPs."""
    if not config.get("mlp_bias"):
        return None
    return (
        "mlp_bias: true gives gate_proj, up_proj and down_proj biases, which mcore-bridge cannot load into Megatron's fused "
        f"layers; {OTHER_MODEL}"
    )


def one_expert(config: Mapping[str, Any]) -> str | None:
    """Check routing to one expert, whose normalised weight is 1 whatever the router computes."""
    if config.get("num_experts_per_tok") != 1 or not config.get("norm_topk_prob") or not experts(config):
        return None
    return (
        "num_experts_per_tok: 1 with norm_topk_prob: true divides the weight of each token's only expert by itself, so that it "
        "is always 1; Megatron-Core routes to one expert by its probability. Set norm_topk_prob: false in config.json if that "
        f"is how the model was trained, else {OTHER_MODEL}"
    )


def no_experts(config: Mapping[str, Any]) -> str | None:
    """Check a mixture-of-experts model for having a layer with experts."""
    layers = expert_layers(config)
    if layers is None or any(layers):
        return None
    return (
        f"decoder_sparse_step: {config.get('decoder_sparse_step')} and mlp_only_layers: {config.get('mlp_only_layers')} leave "
        f"none of the {len(layers)} layers with experts, though num_experts is {experts(config)}; correct config.json, or save "
        "the model under a dense model_type"
    )


def layer_types(config: Mapping[str, Any]) -> str | None:
    """Check for layers that are neither full nor windowed attention."""
    kinds = config.get("layer_types") or []
    unknown = sorted({str(kind) for kind in kinds} - set(KNOWN_LAYERS))
    if not unknown:
        return None
    return (
        f"layer_types holds {', '.join(unknown)} ({sum(kind in unknown for kind in kinds)} of {len(kinds)} layers of "
        f"{config.get('model_type')}): megascend trains softmax attention only; packing, context parallelism and export of other "
        f"layers are proven by nothing here; {OTHER_MODEL}"
    )


def expert_layers(config: Mapping[str, Any]) -> list[bool] | None:
    """List per layer if it has experts, by ``decoder_sparse_step`` and ``mlp_only_layers`` (Qwen); None without these keys."""
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    if not experts(config) or (step is None and dense is None):
        return None
    return [
        # Qwen's rule counts layers from 1.
        layer not in (dense or []) and (layer + 1) % (step or 1) == 0
        for layer in range(config["num_hidden_layers"])
    ]


def experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((config[name] for name in names if config.get(name)), 0)


LOOKS: tuple[Callable[[Mapping[str, Any]], str | None], ...] = (
    layer_types,
    attention_bias,
    mlp_bias,
    one_expert,
    no_experts,
)
