"""MindSpeed's arguments from the ModelConfig and the layout: pure, and the only source of what MindSpeed is told."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megascend.errors import ConfigError

ALGORITHMS = {"ring": "megatron_cp_algo", "all_gather": "kvallgather_cp_algo", "ulysses": "ulysses_cp_algo"}
"""``Parallel.context_algorithm`` in MindSpeed's words."""

OF_MEGATRON_TRAINING = {"reset_position_ids": False, "reset_attention_mask": False}
"""Arguments that MindSpeed reads but Megatron's training script declares, at their defaults there."""

PLAIN = (bool, int, float, str, type(None))


def seed(defaults: Mapping[str, Any], context_size: int, context_algorithm: str) -> dict[str, Any]:
    """Arguments for when only the layout is known: before the adaptor is imported, and before groups are created."""
    return (
        OF_MEGATRON_TRAINING
        | dict(defaults)
        | {
            "context_parallel_size": context_size,
            "context_parallel_algo": ALGORITHMS[context_algorithm],
            "optimization_level": 2 if context_size > 1 else 0,
            "use_flash_attn": True,
            "transformer_impl": "transformer_engine",
        }
    )


def from_config(
    defaults: Mapping[str, Any],
    config: Any,
    context_algorithm: str,
    options: Mapping[str, Any],
    feature_levels: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """All arguments for a model: MindSpeed's defaults, then the ModelConfig, then what the user asked for.

    Args:
        defaults: from MindSpeed's parser, given no command line.
        config: mcore-bridge's ModelConfig.
        options: MindSpeed's own arguments by name; they were checked by :func:`check_options`.
        feature_levels: optimization level from which on MindSpeed looks at a feature's argument, by its name.
    """
    levels = feature_levels or {}
    of_model = {name: getattr(config, name, None) for name in model_fields(type(config), defaults)}
    of_model = {name: value for name, value in of_model.items() if _is_plain(value)}
    # None in the model means "not set"; it must not hide a default of MindSpeed's.
    of_model = {name: value for name, value in of_model.items() if value is not None or name not in defaults}
    return {
        **OF_MEGATRON_TRAINING,
        **defaults,
        **of_model,
        "context_parallel_algo": ALGORITHMS[context_algorithm],
        "optimization_level": max(
            optimization_level(config),
            *(levels[name] for name, value in options.items() if value and name in levels),
            0,
        ),
        "use_flash_attn": True,
        "transformer_impl": "transformer_engine",
        **options,
    }


def model_fields(kind: type, defaults: Mapping[str, Any]) -> list[str]:
    """Fields of the ModelConfig class ``kind`` that describe the model, sorted.

    MindSpeed makes its own arguments fields of every configuration class made after its import, and its layers write to
    them while the model is built; those are not the model's to say. Callbacks are set later and say nothing either.
    """
    described = set(getattr(kind, "__dataclass_fields__", {}))
    megatrons = {name for base in kind.__mro__ if base.__module__.startswith("megatron.") for name in _annotated(base)}
    return sorted(
        name for name in described if (name in megatrons or name not in defaults) and not name.endswith("_func")
    )


def _annotated(kind: type) -> set[str]:
    return set(vars(kind).get("__annotations__", {}))


def optimization_level(config: Any) -> int:
    """2 if the model needs one of MindSpeed's level-2 features, else 0 (the basic patches)."""
    grouped_experts = bool(getattr(config, "num_moe_experts", None)) and getattr(config, "moe_grouped_gemm", False)
    latent = getattr(config, "multi_latent_attention", False)
    return 2 if config.context_parallel_size > 1 or latent or grouped_experts else 0


def signature(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What two sets of arguments must share for MindSpeed's patches to be the same."""
    return tuple((name, repr(arguments[name])) for name in sorted(arguments))


def check_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that MindSpeed does not have, or that belong to another setting."""
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ConfigError(f"mindspeed: no argument of MindSpeed is called {', '.join(unknown)}")
    owned = {
        "context_parallel_algo": "parallel.context_algorithm",
        "optimization_level": "the model, the layout and the other options",
        "transformer_impl": "megascend: layers always have Transformer Engine's interface",
    }
    for name, setting in owned.items():
        if name in options:
            raise ConfigError(f"mindspeed.{name} is decided by {setting}")


def namespace(arguments: Mapping[str, Any]) -> argparse.Namespace:
    """``arguments`` in the form MindSpeed keeps them."""
    return argparse.Namespace(**arguments)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, PLAIN) or type(value).__module__ == "torch"  # dtypes
