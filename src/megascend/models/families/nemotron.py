"""Nemotron-H: layers with one thing each, a Mamba-2 state space, softmax attention without positions, an MLP, or experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megascend.config.rules import Rule
from megascend.models.base import LINEAR, OTHER_ENGINE, Architecture, Config

ATTENTION, MLP, EXPERTS = "full_attention", "mlp", "moe"
SYMBOLS = {LINEAR: "M", ATTENTION: "*", MLP: "-", EXPERTS: "E"}
"""Megatron-Core's symbols in a pattern of layers, by transformers' names in ``layer_types``."""
OLDER_NAMES = {"mamba": LINEAR, "attention": ATTENTION}
"""Names of layers in files of earlier versions of transformers."""
DEFAULT_SIZES = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
"""transformers' defaults."""
FIXED = {
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "residual_in_fp32": False,
    "sliding_window": None,
    "hidden_dropout": 0.0,
}
"""Settings that mcore-bridge, Megatron-Core or transformers has in its code, by the value that all of them compute with."""


@dataclass(frozen=True)
class NemotronH(Architecture):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3, whose experts have no gate, and may work in a narrower latent space."""

    megatron: str | None = "megascend.models.families.nemotron_megatron"
    megatron_core: str | None = "0.19"
    lora_targets: str | None = "megascend.training.lora.target_maps:layer_targets_of_single_mixers"
    router: Literal["softmax", "sigmoid"] | None = "sigmoid"
    layer_kinds: tuple[str, ...] = tuple(SYMBOLS)
    renamed: tuple[tuple[str, str], ...] = (("backbone.", "model."),)
    # Adapters are not defined for experts without a gate, and peft refuses this one: mamba_ssm multiplies by its weights itself.
    without_adapters: tuple[str, ...] = (
        *(".experts.up_proj", ".experts.gate_up_proj", ".experts.down_proj"),
        "mixer.out_proj",
    )
    fixed: Mapping[str, Any] = field(default_factory=lambda: FIXED)
    packages: tuple[str, ...] = ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d")

    def normalise(self, config: Config) -> dict[str, Any]:
        # transformers leaves sizes that are its defaults out of files of some versions.
        normalised = DEFAULT_SIZES | super().normalise(config)
        kinds = _kinds(config)
        if kinds is None:
            return normalised
        # transformers counts the layers by the list, and writes no number; but it writes a number of experts for every model.
        return normalised | {
            "layer_types": kinds,
            "num_hidden_layers": len(kinds),
            "mlp_layer_types": ["sparse" if kind == EXPERTS else "dense" for kind in kinds],
            **({} if EXPERTS in kinds else {"n_routed_experts": None, "num_experts_per_tok": None}),
        }

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        kinds = _kinds(config) or []
        settings: dict[str, Any] = {
            "hybrid_layer_pattern": "".join(SYMBOLS.get(kind, "?") for kind in kinds),
            "num_layers": len(kinds),
            "is_hybrid_model": True,
            "layernorm_epsilon": config.get("layer_norm_epsilon") or 1e-5,
            "ffn_hidden_size": config["intermediate_size"],
        }
        if EXPERTS in kinds:
            settings |= {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_latent_size": config.get("moe_latent_size"),
                # transformers has one MLP of this width, regardless of n_shared_experts.
                "moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"],
            }
        else:  # its configurations state a number of experts, which no layer has
            settings |= dict.fromkeys(
                (
                    *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
                    *("moe_router_num_groups", "moe_router_group_topk"),
                )
            )
        return settings

    rules = (
        *Architecture.rules,
        Rule(
            f"time_step_limit with {{model_type}}: Megatron-Core does not limit the steps of its state spaces; {OTHER_ENGINE}",
            lambda s: step_limits(s.config) != (0.0, math.inf),
        ),
        Rule(
            "mamba_num_heads with n_groups={n_groups}: it is no multiple; correct config.json",
            lambda s: s["mamba_num_heads"] % s["n_groups"] > 0,
        ),
    )
    layout_rules = (
        Rule(
            "parallel.tensor with parallel.context={context} and {mamba_num_heads} heads of state spaces: their product does "
            "not divide the heads; lower one of them",
            lambda s: s["mamba_num_heads"] % (s.tensor * s.context) > 0,
        ),
        Rule(
            # Context parallel ranks divide a tensor parallel rank's groups, or share one.
            "parallel.tensor with parallel.context={context} and {n_groups} groups of state spaces: they do not divide the "
            "groups; lower one of them",
            lambda s: (
                s["n_groups"] % s.tensor > 0
                or max(s["n_groups"] // s.tensor, s.context) % min(s["n_groups"] // s.tensor, s.context) > 0
            ),
        ),
    )
    stage_rules = (
        Rule(
            "model_type with stages of {chunk_layers} layers: Megatron-Core's hybrid models have stages of one size; choose a "
            "parallel.pipeline that divides the layers",
            lambda s: len(set(s.chunk_layers)) > 1,
        ),
    )

    def selfcheck_settings(self, config: Config, layers: int) -> dict[str, Any]:
        kinds = (_kinds(config) or [])[:layers]
        heads, groups = min(config["mamba_num_heads"], 8), min(config["n_groups"], 2)
        small: dict[str, Any] = {
            # Both names: transformers' own, and the common one that its classes translate.
            "layers_block_type": kinds,
            "layer_types": kinds,
            "mamba_num_heads": heads if config["mamba_num_heads"] % heads == heads % groups == 0 else groups,
            "n_groups": groups,
        }
        limits = {
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
        }
        return small | {name: min(config[name], limit) for name, limit in limits.items() if config.get(name)}


def step_limits(config: Config) -> tuple[float, float]:
    """Return the smallest and largest step of the state spaces (``time_step_limit``).

    The model's authors, Megatron-Core and vLLM compute with them; transformers 5.24 takes ``time_step_min``, a setting of new
    models, for the smallest (huggingface/transformers#48989).
    """
    smallest, largest = config.get("time_step_limit") or (0.0, math.inf)
    if isinstance(largest, Mapping):  # transformers 5 writes infinity as {"__float__": "Infinity"}
        largest = largest["__float__"]
    return float(smallest), float(largest)


def _kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return transformers' names of the layers, from a list or a pattern of symbols; None if there is neither."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds:
        return [OLDER_NAMES.get(str(kind), str(kind)) for kind in kinds]
    pattern = config.get("hybrid_override_pattern")
    names = {symbol: kind for kind, symbol in SYMBOLS.items()}
    return None if not pattern else [names.get(symbol, symbol) for symbol in str(pattern)]


TINY = {
    "layers_block_type": [LINEAR, EXPERTS, ATTENTION, LINEAR, MLP, EXPERTS],
    "num_hidden_layers": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 32,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}
FAMILIES = (NemotronH(("nemotron_h",), proven=True, model_class="NemotronHForCausalLM", tiny=TINY),)
