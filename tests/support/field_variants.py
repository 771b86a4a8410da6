"""Variants of a family's tiny model: one field of its configuration at a time with another sensible value. Pure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megascend.models import architecture_named, expert_count
from megascend.testing.tiny_models import tiny_config

NOT_COMPUTED = {
    # Names, and what describes files.
    *("_name_or_path", "architectures", "model_type", "transformers_version", "id2label", "label2id", "problem_type"),
    # Set by run files: precision, and moe.aux_loss with its coefficient (docs/numerics.md).
    *("dtype", "output_router_logits", "router_aux_loss_coef"),
    # With variants of their own: rope_variants, and tests/models/test_mtp.py for heads of multi-token prediction.
    *("rope_parameters", "rope_theta", "num_nextn_predict_layers", "mtp_layers_block_type"),
}
"""Fields that are not swept."""
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "swish", "tanh")
VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "mamba_hidden_act": ("gelu", "relu"),
    "mlp_hidden_act": ("relu", "silu"),
    "hidden_size": (96,),
    "vocab_size": (323, 384),
    "pad_token_id": (5,),
    "initializer_range": (0.5,),
    "chunk_size_feed_forward": (2,),
    "pretraining_tp": (2,),
    "mamba_ssm_cache_dtype": ("bfloat16",),
    # Of vision towers, and of the tokens that stand for images.
    "depth": (2, 4),
    "in_channels": (1,),
    "num_heads": (1, 4),
    "num_position_embeddings": (4, 64),
    "patch_size": (2, 8),
    "temporal_patch_size": (1, 4),
    "spatial_merge_size": (1, 4),
    "out_hidden_size": (32,),
    "deepstack_visual_indexes": ([1], [0, 1, 2]),
    "num_hidden_layers": (2,),
    "num_attention_heads": (8, 2),
    "num_key_value_heads": (1, 4),
    "head_dim": (8, 32, None),
    "max_position_embeddings": (41, 1024),
    "rms_norm_eps": (0.1, 0.0),
    "layer_norm_epsilon": (0.1,),
    "sliding_window": (5, None),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 2),
    "clip_qkv": (0.5,),
    "swiglu_limit": (0.5, 20.0),
    "num_experts_per_tok": (1, 3),
    "moe_k": (1, 3),
    "top_k_experts": (1, 3),
    "num_kv_shared_layers": (2,),
    "hidden_size_per_layer_input": (16,),
    "vocab_size_per_layer_input": (640,),
    "use_bidirectional_attention": ("all", None),
    "per_layer_config": (
        {"1": {"head_dim": 16, "num_key_value_heads": 4}, "3": {"head_dim": 16, "num_key_value_heads": 4}},
        {"3": {"head_dim": 64}},
        {"0": {"head_dim": 32}},
    ),
    "n_group": (1, 2, 3, 4, None),
    "topk_group": (1, 2, None),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("sigmoid", "softmax"),
    "q_lora_rank": (None, 48),
    "v_head_dim": (8, 32),
    "qk_head_dim": (48,),
    "moe_latent_size": (None, 48),
    "moe_norm_min": (0.9,),
    "moe_layer_end_index": (2, -1),
    "moe_layer_start_index": (0, 2),
    "moe_layer_interval": (2,),
    "first_k_dense_replace": (0, 2),
    "mlp_only_layers": ([1],),
    "decoder_sparse_step": (2,),
    "n_shared_experts": (0, 2),
    "num_shared_experts": (0, 2),
    "moe_num_shared_experts": (0, 2),
    "time_step_limit": ([0.01, 0.02],),
    "no_rope_layers": ([1, 1, 0, 1],),
    "index_n_heads": (24,),  # with few heads scores are 0, and the choice among them is that of a sort
    "indexer_types": (["full"] * 4, ["full", "full", "shared", "shared"]),
    "layers_block_type": (["moe", "linear_attention", "full_attention", "mlp", "linear_attention", "moe"],),
    "layer_types": (["full_attention"] * 4, ["sliding_attention"] * 4, ["full_attention", "sliding_attention"] * 2),
    "mlp_layer_types": (["sparse"] * 4, ["dense", "sparse", "dense", "sparse"]),
    "partial_rotary_factor": (0.5, 0.25),
    "rotary_dim": (16, 8),
}
"""Values by field; other fields have those that follow from their type (:func:`values`)."""
READ_BY_STACK: dict[str, tuple[Any, ...]] = {
    "layer_norm_epsilon": (0.1,),
    "attention_bias": (True,),
    "qkv_bias": (True,),
    "use_bias": (True,),
    "mlp_bias": (True,),
    "head_dim": (8, 32),
    "rope_interleave": (True, False),
    "rotary_dim": (8,),
    "use_qk_norm": (True, False),
    "qk_norm": (True, False),
    "swiglu_limit": (0.5,),
    "partial_rotary_factor": (0.5,),
    "sliding_window": (5,),
    "use_sliding_window": (True, False),
    "layer_types": (["full_attention", "sliding_attention"] * 2,),
    "original_max_position_embeddings": (16,),
    "attention_dropout": (0.1,),
    "hidden_dropout": (0.1,),
    "residual_dropout": (0.1,),
    "residual_in_fp32": (True,),
    "no_rope_layers": ([1, 0, 1, 1],),
    "full_attention_interval": (2,),
    "logit_scale": (0.5,),
    "attn_logit_softcapping": (1.0,),
    "final_logit_softcapping": (1.0,),
    "clip_qkv": (0.5,),
}
"""Keys that mcore-bridge, authors' code or other families read, for families whose classes in transformers do not list them."""
READ_BY_STACK_OF_MIXTURES: dict[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (2.5,),
    "router_scaling_factor": (2.5,),
    "scoring_func": ("sigmoid", "softmax"),
    "score_function": ("sigmoid", "softmax"),
    "moe_router_use_sigmoid": (True, False),
    "moe_router_enable_expert_bias": (True, False),
    "topk_method": ("greedy", "noaux_tc"),
    "n_group": (2,),
    "topk_group": (1,),
    "first_k_dense_replace": (1,),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([1],),
    "moe_layer_freq": (2,),
    "n_shared_experts": (1,),
    "num_shared_experts": (1,),
    "shared_expert_intermediate_size": (32,),
    "moe_shared_expert_intermediate_size": (32,),
    "moe_intermediate_size": (48,),
    "router_jitter_noise": (0.1,),
    "mlp_layer_types": (["dense", "sparse", "sparse", "sparse"],),
}
IN_TRAINING = ("dropout", "jitter")
"""Parts of the names of fields that act in training only."""


@dataclass(frozen=True)
class Variant:
    """A configuration in which one field has another value.

    Attributes:
        field: its name, dotted for a field of a nested section; empty for the family's own configuration.
        label: name and value.
        config: content of ``config.json``.
    """

    field: str
    label: str
    config: dict[str, Any]

    @property
    def in_training(self) -> bool:
        """Check whether the field acts in training only."""
        return any(part in self.field for part in IN_TRAINING)


def variants(model_type: str) -> list[Variant]:
    """Return the family's own configuration and one variant for each field and value."""
    from transformers import AutoConfig

    architecture = architecture_named(model_type)
    architecture.make_known_to_transformers()
    base = tiny_config(model_type)
    config = AutoConfig.for_model(**copy.deepcopy(base))
    full = json.loads(config.get_text_config().to_json_string(use_diff=False))
    read_by_stack = READ_BY_STACK | (READ_BY_STACK_OF_MIXTURES if expert_count(architecture.normalise(full)) else {})
    found = [Variant("", "as it is", base)]
    for field, current in sorted(full.items()):
        if field not in NOT_COMPUTED:
            found += [_variant(base, {field: value}, field) for value in values(field, current) if value != current]
    for field, candidates in read_by_stack.items():
        if field not in full:
            found += [_variant(base, {field: value}, field) for value in candidates]
    if "per_layer_config" in full:  # which transformers makes of these
        for field, value in (
            ("global_head_dim", 64),
            ("num_global_key_value_heads", 1),
            ("num_global_key_value_heads", None),
        ):
            found.append(_variant(base, {field: value}, field))
    found += rope_variants(base, full)
    if architecture.images is not None:
        found += image_variants(base, json.loads(config.to_json_string(use_diff=False)))
    return found


def image_variants(base: dict[str, Any], full: dict[str, Any]) -> Iterator[Variant]:
    """Return variants of the tower (``vision_config``) and of the settings beside both sections."""
    for section, settings in (("", full), ("vision_config", full["vision_config"])):
        for field, current in sorted(settings.items()):
            if field in NOT_COMPUTED or field in ("text_config", "vision_config", "tie_word_embeddings"):
                continue
            for value in values(field, current):
                if value == current:
                    continue
                config = copy.deepcopy(base)
                (config[section] if section else config)[field] = value
                name = f"{section or 'beside'}.{field}"
                yield Variant(name, f"{name}={json.dumps(value)}", config)
    config = copy.deepcopy(base)
    config["vision_config"]["rope_parameters"] = full["vision_config"]["rope_parameters"] | {"rope_theta": 500.5}
    yield Variant("vision_config.rope_parameters", "vision_config.rope_parameters.rope_theta", config)


def values(field: str, current: Any) -> tuple[Any, ...]:
    """Return other values of a field: from :data:`VALUES`, or by its type."""
    if field in VALUES:
        return VALUES[field]
    if isinstance(current, bool):
        return (not current,)
    if field.endswith("_token_id"):
        return (318,)
    if isinstance(current, int) and field.endswith("_dim"):
        return (2 * current, current // 2)
    if isinstance(current, int):
        return (current * 3 // 2,) if field.endswith(("_size", "_rank")) else (2 * current, 1)
    if isinstance(current, float):
        return (0.1,) if current == 0 else (2 * current, current / 2)
    raise AssertionError(f"no values for field {field}, which is {current!r}: add some to VALUES")


def rope_variants(base: dict[str, Any], full: dict[str, Any]) -> Iterator[Variant]:
    """Return variants of RoPE: each type with and without its optional keys, a part of each head, other sections."""
    current = full.get("rope_parameters")
    if not current:
        return
    kinds = [kind for kind, section in current.items() if isinstance(section, dict)]
    for kind in kinds:  # a section for each kind of layer
        for name, change in (("rope_theta", {"rope_theta": 500.5}), ("linear", {"rope_type": "linear", "factor": 4.0})):
            sections = current | {kind: current[kind] | change}
            yield _variant(base, {"rope_parameters": sections}, f"rope_parameters.{kind}.{name}")
    current = current[kinds[0]] if kinds else current
    theta = current.get("rope_theta", 10000.0)
    own = {key: value for key, value in current.items() if key.startswith(("mrope", "partial"))}
    plain = {"rope_type": "default", "rope_theta": theta} | own
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    width = full.get("qk_rope_head_dim") or full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    pairs = int(width * float(own.get("partial_rotary_factor", 1.0))) // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [1.0 + pair for pair in range(pairs)]}
    longrope = plain | {"rope_type": "longrope", "original_max_position_embeddings": 16} | factors
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    sections = {
        "rope_theta": plain | {"rope_theta": 500.5},
        "rope_type=default": plain,
        "rope_type=linear": plain | {"rope_type": "linear", "factor": 4.0},
        "rope_type=dynamic": plain | {"rope_type": "dynamic", "factor": 4.0},
        "rope_type=llama3": plain | {"rope_type": "llama3", "factor": 4.0} | llama3,
        "rope_type=longrope": longrope,
        "rope_type=longrope, factor": longrope | {"factor": 4.0},
        "rope_type=longrope, attention_factor": longrope | {"attention_factor": 1.5},
        "partial_rotary_factor, rope_type=proportional": plain
        | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        "rope_type=yarn": yarn,
        "rope_type=yarn, beta": yarn | {"beta_fast": 8, "beta_slow": 2},
        "rope_type=yarn, truncate": yarn | {"truncate": False},
        "rope_type=yarn, attention_factor": yarn | {"attention_factor": 1.5},
        "rope_type=yarn, mscale": yarn | {"mscale": 1.0},
        "rope_type=yarn, mscale_all_dim": yarn | {"mscale_all_dim": 0.7},
        "rope_type=yarn, both mscales": yarn | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "rope_type=yarn, equal mscales": yarn | {"mscale": 0.7, "mscale_all_dim": 0.7},
        "partial_rotary_factor": plain | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.25": plain | {"partial_rotary_factor": 0.25},
    }
    if "mrope_section" in own:
        without = {key: value for key, value in plain.items() if not key.startswith("mrope")}
        sections |= {
            "mrope_interleaved=False": plain | {"mrope_interleaved": False},
            "mrope_interleaved": without | {"mrope_section": own["mrope_section"]},
            "mrope_section": without | {"mrope_interleaved": True},
            "mrope_section, mrope_interleaved": without,
            "mrope_section=reversed": plain | {"mrope_section": own["mrope_section"][::-1]},
        }
    for label, section in sections.items():
        if section != current:
            # Of transformers 5, of earlier versions with ``type`` (both read by authors), and with a theta of its own.
            yield _variant(base, {"rope_parameters": section}, f"rope_parameters.{label}")
    yield _variant(base, {"rope_scaling": {"type": "linear", "factor": 4.0} | own}, "rope_scaling.type=linear")
    older = {key: value for key, value in yarn.items() if key not in ("rope_type", "rope_theta")} | {"type": "yarn"}
    yield _variant(base, {"rope_scaling": older}, "rope_scaling.type=yarn")
    yield _variant(base, {"rope_theta": 500.5}, "rope_theta")


def _variant(base: dict[str, Any], changes: dict[str, Any], field: str) -> Variant:
    config = copy.deepcopy(base)
    text = config.get("text_config", config)
    if "rope_parameters" in changes:
        text.pop("rope_theta", None)
    elif changes.keys() & {"rope_scaling", "rope_theta"}:
        theta = (text.pop("rope_parameters", None) or {}).get("rope_theta", 10000.0)
        text.setdefault("rope_theta", theta)
    text.update(copy.deepcopy(changes))
    for name, value in changes.items():
        if name == "num_hidden_layers":
            text.update(
                {key: entry[:value] for key, entry in text.items() if isinstance(entry, list) and len(entry) == 4}
            )
        if name in config and name == "tie_word_embeddings":
            config[name] = value
        if name == "hidden_size" and "out_hidden_size" in config.get(
            "vision_config", {}
        ):  # the tower's features are its inputs
            config["vision_config"]["out_hidden_size"] = value
    name, _, rest = field.partition("=")
    label = f"{name}={json.dumps(next(iter(changes.values())))}" if "." not in field else field
    return Variant(name.split(",")[0] if not rest else name, label, config)
