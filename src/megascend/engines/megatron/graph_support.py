"""Checks whether an engine's micro batches can be captured as CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megascend.config import Adam, Precision, Recompute
from megascend.errors import ConfigError
from megascend.runtime.topology.topology import Topology
from megascend.training.lora.target_modules import is_embedding, is_output

ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding that depend on the sequence length, which padding to a captured shape changes."""


def raise_unsupported(reason: str | None) -> None:
    """Raise ConfigError with ``reason``, from one of the functions below; a no-op if it is None."""
    if reason is not None:
        raise ConfigError(f"batching.cuda_graphs {reason}; leave it out")


def unsupported_reason(
    device_type: str,
    topology: Topology,
    precision: Precision,
    recompute: Recompute,
    config: Any,
    adam: Adam | None,
    *,
    grouped: bool,
) -> str | None:
    """Return the reason why micro batches of this engine cannot be captured, or None.

    Args:
        config: mcore-bridge's ModelConfig.
        adam: Adam settings of the model; None if its own parameters are not trained.
        grouped: experts, if any, are computed without the host.
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
        return "does not support fp16"
    if recompute.granularity != "none":
        return f"does not support recompute.granularity={recompute.granularity}"
    if config.num_moe_experts and adam is not None:
        return "does not support training experts, whose loads would count padding (adapters on them are supported)"
    if config.num_moe_experts and not grouped:
        return "needs moe.experts: grouped, as upstream's experts wait for their loads"
    if config.hidden_dropout > 0 or config.attention_dropout > 0:
        return "does not support the model's own dropout"
    if rope.get("rope_type", rope.get("type")) in ROPE_OF_LENGTH:
        return "does not support rotary embeddings that depend on the length"
    if adam is not None and adam.overlap_grad_reduce:
        return "does not support optimizer.overlap_grad_reduce, whose reductions the host starts"
    return None


def unsupported_targets_reason(targets: Sequence[str]) -> str | None:
    """Return the reason why micro batches of adapters on these layers cannot be captured, or None."""
    if any(is_output(name) or is_embedding(name) for name in targets):
        return "does not support lm_head or embed_tokens among adapters.targets"
    return None


@contextlib.contextmanager
def without_rotary_cache(model: Any) -> Iterator[None]:
    """Compute rotary tables within the context instead of taking them from Megatron's cache."""
    rotary = getattr(model, "rotary_pos_emb", None)
    # Megatron decorates forward with lru_cache(maxsize=32), so all rotary embeddings share one cache. A captured step that
    # read a cached table would read freed memory after its eviction.
    clear = getattr(getattr(type(rotary), "forward", None), "cache_clear", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()
