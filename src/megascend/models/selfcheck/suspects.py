"""Find the setting about which two implementations disagree: plan the trials and interpret their results. Pure.

A trial resets a suspect setting to its plain value, in transformers and in Megatron. If both then agree, that setting is the
cause. Several causes at once are found from the other end: all suspects are plain except one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascend.models.selfcheck.slicing import ROPE_SECTIONS, rope_settings

Config = dict[str, Any]


@dataclass(frozen=True)
class Suspect:
    """A setting that may cause a difference.

    Attributes:
        name: name in ``config.json``.
        value: its value there.
        plain: its value in a trial.
        changes: keys of the configuration with their values for that trial.
    """

    name: str
    value: Any
    plain: Any
    changes: Mapping[str, Any]


PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "norm_topk_prob": True,
    "partial_rotary_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "qkv_bias": False,
    "use_qk_norm": False,
    "mlp_bias": False,
    "rope_interleave": False,
    "use_sliding_window": False,
    "logit_scale": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
}
"""Settings and their plain value, which is Megatron-Core's default behaviour."""

SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "model_type", "architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def known_suspects(config: Mapping[str, Any], full: Mapping[str, Any]) -> list[Suspect]:
    """Return settings of :data:`PLAIN` that are not plain, RoPE's parameters, sliding window and groups of experts."""
    values = {**config, **full}  # transformers moves some settings to other keys
    suspects = [
        Suspect(name, values[name], plain, {name: plain})
        for name, plain in PLAIN.items()
        if name in values and values[name] not in (plain, None)
    ]
    suspects += _rope_suspects(config, full)
    if (full.get("n_group") or 1) > 1:
        suspects.append(Suspect("n_group", full["n_group"], 1, {"n_group": 1, "topk_group": 1}))
    if full.get("sliding_window") and full.get("use_sliding_window", True):
        layers = {"layer_types": ["full_attention"] * full["num_hidden_layers"]} if "layer_types" in config else {}
        suspects.append(Suspect("sliding_window", full["sliding_window"], None, {"sliding_window": None, **layers}))
    return suspects


def _rope_suspects(config: Mapping[str, Any], full: Mapping[str, Any]) -> list[Suspect]:
    """Return RoPE's scaling type and partial rotary factor as suspects, where they are not plain."""
    suspects = []
    section = next((name for name in ROPE_SECTIONS if isinstance(config.get(name), Mapping)), None)
    settings = rope_settings(full)
    kinds = [values.get("rope_type") or values.get("type") or "default" for values in settings]
    if section is not None and len(settings) and kinds[0] != "default":
        # The plain variant keeps theta and the rotated part: only the scaling is the suspect.
        theta = settings[0].get("rope_theta") or full.get("rope_theta") or 10000.0
        part = settings[0].get("partial_rotary_factor")
        plain: Config = {"rope_type": "default", "rope_theta": theta} | (
            {"partial_rotary_factor": part} if part else {}
        )
        suspects.append(Suspect(f"{section}.rope_type", kinds[0], "default", {section: plain}))
    inner = [name for name in ROPE_SECTIONS if (config.get(name) or {}).get("partial_rotary_factor") not in (None, 1.0)]
    suspects += [
        Suspect(
            f"{name}.partial_rotary_factor",
            config[name]["partial_rotary_factor"],
            1.0,
            {name: {**config[name], "partial_rotary_factor": 1.0}},
        )
        for name in inner
    ]
    return suspects


def other_suspects(config: Mapping[str, Any], default: Mapping[str, Any], excluded: Sequence[Suspect]) -> list[Suspect]:
    """Return all other settings in the model's ``config.json`` that differ from its architecture's default."""
    covered = {name for suspect in excluded for name in suspect.changes}
    return [
        Suspect(name, value, default[name], {name: default[name]})
        for name, value in config.items()
        if name not in covered and name not in SIZES and name in default and default[name] != value
    ]


@dataclass(frozen=True)
class Plan:
    """Trial configurations in order: one suspect plain, for each; all plain; all plain but one, for each."""

    suspects: Sequence[Suspect]
    configs: Sequence[Config]


def plan(config: Mapping[str, Any], suspects: Sequence[Suspect]) -> Plan:
    """Return the configurations to try; the suspects are of the language model's."""

    def config_without(chosen: Sequence[Suspect]) -> Config:
        changed = dict(config.get("text_config", config))
        for suspect in chosen:
            changed |= suspect.changes
        return {**config, "text_config": changed} if "text_config" in config else changed

    one_plain = [config_without([suspect]) for suspect in suspects]
    but_one = [config_without([other for other in suspects if other is not suspect]) for suspect in suspects]
    return Plan(suspects, [*one_plain, config_without(suspects), *but_one] if suspects else [])


def culprits(trials: Plan, agrees: Sequence[bool]) -> list[Suspect]:
    """Return the suspects that the trials convict; none if the sides disagree even with all of them plain."""
    count = len(trials.suspects)
    if not count:
        return []
    one_plain, all_plain, but_one = agrees[:count], agrees[count], agrees[count + 1 :]
    guilty = [suspect for suspect, agreed in zip(trials.suspects, one_plain, strict=True) if agreed]
    if not guilty and all_plain:
        guilty = [suspect for suspect, agreed in zip(trials.suspects, but_one, strict=True) if not agreed]
    return guilty


def advice(names: Sequence[str], original_positions: int | None, short_samples_agree: bool) -> str:
    """Return advice on the settings ``names``; ``short_samples_agree``: samples of up to ``original_positions`` tokens agree."""
    if original_positions and short_samples_agree and any(name.startswith(ROPE_SECTIONS) for name in names):
        return (
            f"Samples of up to {original_positions} tokens (original_max_position_embeddings) are right as long as no longer "
            f"sample shares their micro batch: set batching.max_length: {original_positions} or less"
        )
    return "megascend cannot train this model as it is configured"
