"""Which engines can run micro batches as CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megascend.config import Adam, Precision, Recompute
from megascend.errors import ConfigError
from megascend.topology.topology import Topology

if TYPE_CHECKING:
    from megascend.lora.registry import AdapterRegistry

ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the length of the sequence, which padding changes."""


def refuse(problem: str | None) -> None:
    """Raise ConfigError, which names the setting, for a problem of :func:`refused_because` or :func:`targets_refused_because`."""
    if problem is not None:
        raise ConfigError(f"batching.cuda_graphs {problem}; leave it out")


def refused_because(
    device_type: str,
    topology: Topology,
    precision: Precision,
    recompute: Recompute,
    config: Any,
    adam: Adam | None,
    *,
    grouped: bool,
) -> str | None:
    """Why no micro batch of this engine can be captured, or None.

    Args:
        config: mcore-bridge's ModelConfig.
        adam: of the model, if it is trained itself.
        grouped: experts, if there are any, are computed without the host.
    """
    split = {
        "tensor": topology.tensor,
        "pipeline": topology.pipeline,
        "context": topology.context,
        "expert": topology.expert,
    }
    divided = [f"parallel.{axis}={size}" for axis, size in split.items() if size > 1]
    rope = config.rope_scaling or {}
    if device_type != "cuda":
        return f"needs a CUDA device, and this is {device_type}"
    if divided:
        return f"needs the whole model on every GPU, and {divided[0]}"
    if precision == "fp16":
        return "does not know fp16"
    if recompute.granularity != "none":
        return f"does not go with recompute.granularity={recompute.granularity}"
    if config.num_moe_experts and adam is not None:
        return (
            "does not go with training experts themselves, whose loads would count padding (adapters on them are fine)"
        )
    if config.num_moe_experts and not grouped:
        return "needs moe.experts: grouped, as upstream's experts wait for their loads"
    if config.hidden_dropout > 0 or config.attention_dropout > 0:
        return "does not go with the model's own dropout"
    if rope.get("rope_type", rope.get("type")) in ROPE_OF_LENGTH:
        return "does not go with rotary embeddings that depend on the length"
    if adam is not None and adam.overlap_grad_reduce:
        return "does not go with optimizer.overlap_grad_reduce, whose reductions the host starts"
    return None


def targets_refused_because(registry: AdapterRegistry) -> str | None:
    """Why no micro batch of these adapters can be captured, or None."""
    modules = [module for group in registry.shape_groups for module in group.target_modules]
    if any(module.is_output or module.is_embedding for module in modules):
        return "does not go with lm_head or embed_tokens among adapters.targets"
    return None


@contextlib.contextmanager
def without_rotary_cache(model: Any) -> Iterator[None]:
    """Rotary tables are computed where they are used until the block ends.

    Megatron keeps the last 32 of them. A captured step that read one of those would read whatever lies there after it has gone.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    clear = getattr(getattr(type(rotary), "forward", None), "cache_clear", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()
