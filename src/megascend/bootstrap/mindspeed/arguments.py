"""MindSpeed's arguments from the ModelConfig and the layout: pure, and the only source of what MindSpeed is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascend.errors import ConfigError

ALGORITHMS = {"ring": "megatron_cp_algo", "all_gather": "kvallgather_cp_algo", "ulysses": "ulysses_cp_algo"}
"""``Parallel.context_algorithm`` in MindSpeed's words."""

OF_MEGATRON_TRAINING = {"reset_position_ids": False, "reset_attention_mask": False}
"""Arguments that MindSpeed reads but Megatron's training script declares, at their defaults there."""

DECIDED_ELSEWHERE = {
    "context_parallel_algo": "parallel.context_algorithm",
    "optimization_level": "the model, the layout and the other options",
    "transformer_impl": "megascend: layers always have Transformer Engine's interface",
}
"""Arguments that follow from other settings, and from which."""


@dataclass(frozen=True)
class Option:
    """An argument of MindSpeed's that users may set.

    Attributes:
        values: those that were tried.
        ring_only: it does nothing without ring context parallelism.
    """

    values: tuple[bool | str, ...] = (True, False)
    ring_only: bool = False


SUPPORTED_OPTIONS: dict[str, Option] = {
    "use_fused_ring_attention_update": Option(ring_only=True),
    "megatron_cp_in_bnsd": Option(ring_only=True),
}
"""Options that were seen to do something, with numbers that stay Hugging Face's (tests/npu/test_options.py)."""

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
    fields: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return all arguments for a model: MindSpeed's defaults, then the ModelConfig, then the user's ``options``.

    ``feature_levels``: optimization level from which on MindSpeed reads a feature's argument; ``fields``: of the ModelConfig's
    class (:func:`model_fields`), where they are known already.
    """
    check_effect(options, config.context_parallel_size, context_algorithm)
    levels = feature_levels or {}
    names = model_fields(type(config), defaults) if fields is None else fields
    of_model = {name: getattr(config, name, None) for name in names}
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
    """Raise ConfigError for every option that was not tried with megascend, with the most specific reason there is."""
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ConfigError(
            f"provider_options: no argument of MindSpeed is called {', '.join(unknown)}; supported are "
            f"{', '.join(SUPPORTED_OPTIONS)}"
        )
    for name, value in options.items():
        if name in DECIDED_ELSEWHERE:
            raise ConfigError(f"provider_options.{name} is decided by {DECIDED_ELSEWHERE[name]}")
        if name in SUPPORTED_OPTIONS:
            values = SUPPORTED_OPTIONS[name].values
            if not any(value is each or (isinstance(each, str) and value == each) for each in values):
                raise ConfigError(
                    f"provider_options.{name}={value!r}: tried with megascend: {', '.join(map(repr, values))}"
                )
        else:
            check_model({name: value, "context_parallel_size": 2})  # what is known of this one
            raise ConfigError(
                f"provider_options.{name} is not among the options that were tried with megascend "
                f"({', '.join(SUPPORTED_OPTIONS)}); most of the others have no effect without Megatron's training script, "
                "or fail in the middle of a run; leave it out"
            )


def check_effect(options: Mapping[str, Any], context_size: int, context_algorithm: str) -> None:
    """Raise ConfigError for supported options that this layout would ignore."""
    for name, value in options.items():
        option = SUPPORTED_OPTIONS.get(name)
        if value and option and option.ring_only and not (context_size > 1 and context_algorithm == "ring"):
            raise ConfigError(
                f"provider_options.{name} has an effect with parallel.context above 1 and parallel.context_algorithm: ring only; "
                "leave it out"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, PLAIN):  # nearly all of them
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return type(value).__module__ == "torch"  # dtypes


NEEDS_MEGATRON_TRAINING = (
    "fp8_format",
    "reset_attention_mask",
    "swap_attention",
    "recompute_activation_function",
    "recompute_norm",
    "recompute_in_advance",
    "recompute_in_bubble",
    "moe_fb_overlap",
    "dualpipev",
    "schedules_method",
    "tp_2d",
    "reuse_fp32_param",
    "layerzero",
    "balanced_moe_experts",
    "disable_gloo_group",
    "hccl_group_buffer",
    "hccl_group_buffer_adaptive",
    "unaligned_linear",
    "use_ascend_coc",
    "virtual_optimizer",
)
"""Arguments whose features import ``megatron.training``, which is not part of the megatron-core package."""


def check_model(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model or options (arguments of :func:`from_config`) that MindSpeed gets wrong."""
    for reason in reasons(arguments):
        raise ConfigError(f"MindSpeed cannot train this: {reason}")


def reasons(arguments: Mapping[str, Any]) -> list[str]:
    """Every reason why not, in a fixed order; empty if there is none."""

    def value(name: str, default: Any = None) -> Any:
        found = arguments.get(name, default)
        return default if found is None else found

    context, algorithm = int(value("context_parallel_size", 1)), value("context_parallel_algo", "megatron_cp_algo")
    found = []
    if value("window_size") is not None:
        found.append(
            f"window attention (window_size={value('window_size')}): its attention ignores the window and sees everything"
        )
    if value("softmax_type", "vanilla") != "vanilla":
        found.append(
            f"softmax_type={value('softmax_type')!r}: its attention computes the vanilla softmax whatever is asked"
        )
    if context > 1 and algorithm == "ulysses_cp_algo":
        found.append(
            "parallel.context_algorithm: ulysses needs one fixed seq_length for all micro batches, and megascend's differ "
            "in length; use ring or all_gather"
        )
    if context > 1 and algorithm.startswith("hybrid"):
        found.append(f"{algorithm} needs a fixed seq_length; use ring or all_gather")
    if context > 1 and algorithm == "kvallgather_cp_algo" and float(value("attention_dropout", 0.0)) > 0:
        found.append(
            f"attention_dropout={value('attention_dropout')} with parallel.context_algorithm: all_gather: its backward pass "
            "draws another dropout mask than the forward pass did; use ring, or set the model's attention_dropout to 0"
        )
    if context > 1 and (value("use_cp_send_recv_overlap", False) or int(value("cp_window_size", 1)) > 1):
        found.append(
            f"use_cp_send_recv_overlap={value('use_cp_send_recv_overlap', False)} or cp_window_size="
            f"{value('cp_window_size', 1)}: MindSpeed makes their process groups before it is told a model's options; leave "
            "them out"
        )
    if output_discarding := sorted(set(value("recompute_modules", [])) & {"layernorm", "mla_up_proj", "moe_act"}):
        found.append(
            f"recompute.modules {', '.join(output_discarding)}: their recomputation asks Transformer Engine for its fp8 state, "
            "which MindSpeed's stand-in does not have; use core_attn, mlp, moe, or recompute.granularity: full"
        )
    for name in NEEDS_MEGATRON_TRAINING:
        if value(name, False):
            found.append(
                f"{name}={value(name)!r}: that feature imports megatron.training, which the megatron-core package does not "
                "contain; leave it out"
            )
    return found


def check_batching(context_size: int, packing: bool) -> None:
    """Refuse packed sequences under context parallelism: no algorithm of MindSpeed divides them as mcore-bridge does."""
    if context_size > 1 and packing:
        raise ConfigError(
            f"batching.packing with parallel.context={context_size} on an NPU: MindSpeed's ring attention fails on packed "
            "sequences, and its all-gather divides them contiguously while mcore-bridge divides them in a zigzag, so that "
            "the logits would be wrong; set batching.packing: false"
        )
