"""What MindSpeed would silently get wrong, or fail at hours later: refused here, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascend.errors import ConfigError

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
    """Refuse a model or options that MindSpeed gets wrong.

    Args:
        arguments: from :func:`megascend.bootstrap.mindspeed.arguments.from_config`.

    Raises:
        ConfigError: with the reason and what to change.
    """
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
    """Refuse packed sequences under context parallelism: no algorithm of MindSpeed divides them as mcore-bridge does.

    Raises:
        ConfigError: both are on.
    """
    if context_size > 1 and packing:
        raise ConfigError(
            f"batching.packing with parallel.context={context_size} on an NPU: MindSpeed's ring attention fails on packed "
            "sequences, and its all-gather divides them contiguously while mcore-bridge divides them in a zigzag, so that "
            "the logits would be wrong; set batching.packing: false"
        )
