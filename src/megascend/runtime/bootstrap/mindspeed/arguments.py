"""Derive MindSpeed's arguments from the ModelConfig and the layout. Pure; the only source of these arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascend.config.rules import Rule, enforce
from megascend.errors import ConfigError

ALGORITHMS = {"ring": "megatron_cp_algo", "all_gather": "kvallgather_cp_algo", "ulysses": "ulysses_cp_algo"}
"""MindSpeed's names of ``Parallel.context_algorithm``."""

MEGATRON_TRAINING_DEFAULTS = {"reset_position_ids": False, "reset_attention_mask": False}
"""Arguments that MindSpeed reads but only Megatron's training script declares, with the script's defaults."""

DECIDED_ELSEWHERE = {
    "context_parallel_algo": "parallel.context_algorithm",
    "optimization_level": "the model, the layout and the other options",
    "transformer_impl": "megascend: layers always have Transformer Engine's interface",
}
"""Arguments that are derived from other settings, and those settings."""


SUPPORTED_OPTIONS = ("use_fused_ring_attention_update", "megatron_cp_in_bnsd")
"""Switches of ring context parallelism with a tested effect, and results equal to Hugging Face's (tests/npu/test_options.py)."""

PLAIN = (bool, int, float, str, type(None))


def seed(defaults: Mapping[str, Any], context_size: int, context_algorithm: str) -> dict[str, Any]:
    """Return the arguments while only the layout is known: before the adaptor's import, and before groups are created."""
    return (
        MEGATRON_TRAINING_DEFAULTS
        | dict(defaults)
        | {
            "context_parallel_size": context_size,
            "context_parallel_algo": ALGORITHMS[context_algorithm],
            # MindSpeed registers context parallelism's features at level 2 only. The other features of that level
            # depend on the model, which is not known yet: see optimization_level().
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
    """Return all arguments for a model: MindSpeed's defaults, then the ModelConfig, then the user's ``options``.

    ``feature_levels``: lowest optimization level at which MindSpeed reads a feature's argument.
    """
    check_effect(options, config.context_parallel_size, context_algorithm)
    levels = feature_levels or {}
    model = {name: getattr(config, name, None) for name in model_fields(type(config), defaults)}
    model = {name: value for name, value in model.items() if _is_plain(value)}
    # None in the model means "not set"; it must not override a default of MindSpeed.
    model = {name: value for name, value in model.items() if value is not None or name not in defaults}
    return {
        **MEGATRON_TRAINING_DEFAULTS,
        **defaults,
        **model,
        "context_parallel_algo": ALGORITHMS[context_algorithm],
        # An option raises the level, since MindSpeed does not read a feature's argument below the level of the feature.
        "optimization_level": max(
            optimization_level(config),
            *(levels[name] for name, value in options.items() if value and name in levels),
            0,
        ),
        "use_flash_attn": True,
        "transformer_impl": "transformer_engine",
        # Last: check_options() has refused what the user may not override.
        **options,
    }


def model_fields(kind: type, defaults: Mapping[str, Any]) -> list[str]:
    """Return the fields of the ModelConfig class ``kind`` that describe the model, sorted.

    MindSpeed adds its own arguments as fields to every configuration class created after its import, and its layers write to
    them while the model is built; those fields are not part of the model. Callbacks are set later and are excluded too.
    """
    fields = set(getattr(kind, "__dataclass_fields__", {}))
    megatron_fields = {
        name for base in kind.__mro__ if base.__module__.startswith("megatron.") for name in _annotated(base)
    }
    return sorted(
        name for name in fields if (name in megatron_fields or name not in defaults) and not name.endswith("_func")
    )


def _annotated(kind: type) -> set[str]:
    return set(vars(kind).get("__annotations__", {}))


def optimization_level(config: Any) -> int:
    """Return 2 if the model needs one of MindSpeed's level-2 features, else 0 (the basic patches)."""
    grouped_experts = bool(getattr(config, "num_moe_experts", None)) and getattr(config, "moe_grouped_gemm", False)
    latent = getattr(config, "multi_latent_attention", False)
    return 2 if config.context_parallel_size > 1 or latent or grouped_experts else 0


def signature(arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a key of the arguments: equal keys result in the same patches of MindSpeed."""
    return tuple((name, repr(arguments[name])) for name in sorted(arguments))


def check_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the most specific reason available, for an option that was not tested with megascend."""
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ConfigError(
            f"provider_options: no argument of MindSpeed is called {', '.join(unknown)}; supported: "
            f"{', '.join(SUPPORTED_OPTIONS)}"
        )
    for name, value in options.items():
        if name in DECIDED_ELSEWHERE:
            raise ConfigError(f"provider_options.{name} is decided by {DECIDED_ELSEWHERE[name]}")
        if name in SUPPORTED_OPTIONS:
            # Not 1, which equals True: MindSpeed was tested with booleans only.
            if not isinstance(value, bool):
                raise ConfigError(f"provider_options.{name}={value!r}: tested with megascend: True, False")
        else:
            # With context parallelism, so that reasons which depend on it are among those that may explain the refusal.
            enforce(RULES, Arguments({name: value, "context_parallel_size": 2}))  # may raise a more specific error
            raise ConfigError(
                f"provider_options.{name} is not among the options that were tested with megascend "
                f"({', '.join(SUPPORTED_OPTIONS)}); leave it out"
            )


def check_effect(options: Mapping[str, Any], context_size: int, context_algorithm: str) -> None:
    """Raise ConfigError for supported options that this layout would ignore."""
    for name, value in options.items():
        if value and name in SUPPORTED_OPTIONS and not (context_size > 1 and context_algorithm == "ring"):
            raise ConfigError(
                f"provider_options.{name} has an effect with parallel.context above 1 and parallel.context_algorithm: ring only; "
                "leave it out"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, PLAIN):  # nearly all values
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


ON_OTHER_DEVICES = "use CUDA or the CPU"


class Arguments(dict[str, Any]):
    """Arguments of MindSpeed, or fields of a ModelConfig, in which None means "not set", as does a missing one."""

    def __missing__(self, name: str) -> None:
        return None

    @property
    def divides_context(self) -> bool:
        """Return True with context parallelism."""
        return (self["context_parallel_size"] or 1) > 1


RULES: tuple[Rule[Arguments], ...] = (
    Rule(
        f"window_size with MindSpeed: its attention ignores the window and attends to all tokens; {ON_OTHER_DEVICES}",
        lambda a: a["window_size"] is not None,
    ),
    Rule(
        f"softmax_type with MindSpeed: its attention computes the vanilla softmax regardless; {ON_OTHER_DEVICES}",
        lambda a: a["softmax_type"] not in (None, "vanilla"),
    ),
    Rule(
        "multi_latent_attention with MindSpeed: its layer reads settings that mcore-bridge lacks, such as "
        f"mscale; {ON_OTHER_DEVICES}",
        lambda a: bool(a["multi_latent_attention"]),
    ),
    Rule(
        "experimental_attention_variant with MindSpeed: its kernels (fla_npu, Triton) need a real NPU, and no "
        f"test has run them; {ON_OTHER_DEVICES}",
        lambda a: a["experimental_attention_variant"] == "gated_delta_net",
    ),
    Rule(
        "hf_model_type with MindSpeed: mcore-bridge passes the configuration by position, MindSpeed reads it by "
        f"keyword; {ON_OTHER_DEVICES}",
        lambda a: a["hf_model_type"] == "glm4",
    ),
    Rule(
        "context_parallel_algo with MindSpeed: it needs one fixed seq_length; set parallel.context_algorithm: "
        "ring or all_gather",
        lambda a: a.divides_context and str(a["context_parallel_algo"]).startswith(("ulysses", "hybrid")),
    ),
    Rule(
        "attention_dropout with parallel.context_algorithm=all_gather: its backward pass draws another mask than "
        "the forward pass; use ring, or set it to 0",
        lambda a: (
            a.divides_context
            and a["context_parallel_algo"] == "kvallgather_cp_algo"
            and (a["attention_dropout"] or 0) > 0
        ),
    ),
    *(
        Rule(
            f"{name} with MindSpeed: its process groups are created before a model's options are known; leave it out",
            lambda a, name=name, off=off: a.divides_context and (a[name] or off) > off,
        )
        for name, off in (("use_cp_send_recv_overlap", False), ("cp_window_size", 1))
    ),
    Rule(
        "recompute_modules with MindSpeed: layernorm, mla_up_proj, moe_act read state of Transformer Engine; use "
        "core_attn, mlp, moe",
        lambda a: not {"layernorm", "mla_up_proj", "moe_act"}.isdisjoint(a["recompute_modules"] or ()),
    ),
    *(
        Rule(
            f"{name} with MindSpeed: it imports megatron.training, which megatron-core does not contain; leave it out",
            lambda a, name=name: bool(a[name]),
        )
        for name in NEEDS_MEGATRON_TRAINING
    ),
)
"""Models and options that MindSpeed computes wrongly, by the arguments of :func:`from_config`."""


def check_batching(context_size: int, packing: bool) -> None:
    """Raise ConfigError for packed sequences with context parallelism: MindSpeed does not split them like mcore-bridge."""
    if context_size > 1 and packing:
        raise ConfigError(
            f"batching.packing: true with parallel.context={context_size}: MindSpeed's ring attention fails, all-gather gives "
            "wrong logits; set false"
        )
