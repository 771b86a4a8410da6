"""Attention of Megatron's layers over common prefixes that a micro batch computes once.

Such a micro batch runs as one sequence of rows [n, 1], with rotary angles of each row's own position. Only a layer's core
attention knows of samples (:func:`megascend.engines.common.sample_attention.prefix_attention`). The layout travels as the layers'
``packed_seq_params``, since a recomputed layer may run when another micro batch has been entered. For latent attention the rows
are a packed sequence [n], for which mcore-bridge selects the angles by position itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megascend.changes import patch
from megascend.engines.common.sample_attention import prefix_attention
from megascend.engines.megatron.cached_attention import AttentionSettings, attention_settings
from megascend.engines.rules import ROPE_OF_LENGTH
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.kernels.prefix_attention import PrefixLayout

REASON = "prefixes that samples have in common are computed once"
TE_KERNEL_CAPABILITY, TE_KERNEL_WIDTH = (9, 0), 128
"""Where cuDNN's kernel was compared, Hopper, and its widest head for packed sequences in a backward pass there."""
MOST_LEVELS = 3
"""Levels of a tree whose attention is computed in parts. A deeper one has many short parts."""


def unshared_reason(engine: Any) -> str | None:
    """Return the reason why the samples of a Megatron engine share no prefixes, or None. Local: stages have different layers."""
    config, batching = engine.config, engine.batching
    rope: dict[str, Any] = config.rope_scaling or {}
    cores = [
        getattr(getattr(layer, "self_attention", None), "core_attention", None)
        for chunk in engine.decoders
        for layer in chunk.decoder.layers
    ]
    reasons = {
        "samples are not packed": not batching.packing,
        "batching.cuda_graphs": batching.cuda_graphs is not None,
        "mtp: train": engine.mtp_loss_weight > 0,
        f"parallel.context={engine.topology.context}": engine.topology.context > 1,
        "latent attention with apply_rope_fusion": config.multi_latent_attention and config.apply_rope_fusion,
        "dropout of the model": max(config.hidden_dropout, config.attention_dropout) > 0,
        f"position embedding {config.position_embedding_type}": config.position_embedding_type
        not in ("rope", "mrope", "none", "learned_absolute"),
        "kinds of layers with rotary embeddings of their own": any(isinstance(part, dict) for part in rope.values()),
        "rotary embeddings that depend on the length": rope.get("rope_type", rope.get("type")) in ROPE_OF_LENGTH,
        "layers without softmax attention": not all(isinstance(core, te.TEDotProductAttention) for core in cores),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class SharedPrefixes:
    """Patches of a rank's layers for micro batches with a :class:`PrefixLayout`; others run as before.

    Args:
        chunks: the rank's language models.
        config: mcore-bridge's ModelConfig.
    """

    def __init__(self, chunks: Sequence[Any], config: Any) -> None:
        self._positions: Tensor | None = None  # of the rows of the micro batch that runs, if it shares prefixes
        self._format = "thd" if config.multi_latent_attention else "sbhd"
        for chunk in chunks:
            rotary = getattr(chunk, "rotary_pos_emb", None)
            # Angles by time, height and width are computed from the positions of the micro batch anyway.
            if rotary is not None and self._format == "sbhd" and config.position_embedding_type != "mrope":
                patch(rotary, "forward", partial(self._angles, rotary.forward), REASON)
            for layer in chunk.decoder.layers:
                core, settings = layer.self_attention.core_attention, attention_settings(layer, config)
                patch(core, "forward", partial(_attend, core, settings, core.forward), REASON)

    def enter(self, batch: MicroBatch) -> PackedSeqParams | None:
        """Set the micro batch that a chunk computes next, and return the parameters to call it with."""
        if not isinstance(batch.packed, PrefixLayout):
            self._positions = None
            return batch.packed
        self._positions = batch.position_ids[0]
        return PrefixParams(self._format, batch.packed)

    def _angles(self, forward: Callable[..., Tensor], length: int, *args: Any, **kwargs: Any) -> Tensor:
        """Compute rotary angles [tokens, 1, 1, head dim]; with shared prefixes those of each row's position."""
        # With shared prefixes the length is that of the longest sequence; see PrefixParams.
        angles = forward(length, *args, **kwargs)
        return angles if self._positions is None else angles[self._positions]


class PrefixParams(PackedSeqParams):
    """Parameters of one row of tokens, for all of a layer but its core attention, which reads ``prefixes``."""

    def __init__(self, qkv_format: str, prefixes: PrefixLayout) -> None:
        # Megatron's rotary table has as many rows as the longest sequence has tokens. Starts only say that tokens are packed.
        super().__init__(
            qkv_format=qkv_format,
            cu_seqlens_q=prefixes.query_starts,
            cu_seqlens_kv=prefixes.query_starts,
            max_seqlen_q=max(prefixes.keys),
            max_seqlen_kv=max(prefixes.keys),
        )
        self.prefixes = prefixes


def _attend(
    core: Any,
    settings: AttentionSettings,
    forward: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute core attention of [rows, 1, heads, head dim] or [rows, heads, head dim]; [rows, (1,) heads * head dim]."""
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, PrefixParams):
        return forward(query, key, value, *args, **kwargs)
    q, k, v = (states.flatten(0, -3) for states in (query, key, value))
    if _has_te_kernel(core, settings, query) and len(params.prefixes.levels) <= MOST_LEVELS:
        from megascend.training.kernels.te_attention import TransformerEngineParts

        mixed = params.prefixes.merge(q, k, v, TransformerEngineParts(settings[0], core.deterministic)).flatten(1)
    else:
        q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
        mixed = prefix_attention(q, k, v, params.prefixes, *settings)[0].transpose(0, 1).flatten(1)
    return mixed if query.dim() == 3 else mixed[:, None]


def _has_te_kernel(core: Any, settings: AttentionSettings, query: Tensor) -> bool:
    """Check whether Transformer Engine has a kernel for parts: cuDNN's on Hopper."""
    _, window, sinks = settings
    computed = (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(query.device) == TE_KERNEL_CAPABILITY
        and window is None
        and sinks is None
        and not core.config.multi_latent_attention
        and query.shape[-1] <= TE_KERNEL_WIDTH
        and query.shape[-1] % 8 == 0
    )
    if not computed:
        return False
    from megascend.training.kernels.te_attention import returns_log_sums

    return returns_log_sums()
