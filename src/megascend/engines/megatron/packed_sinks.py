"""Attention with sinks (gpt-oss) of packed samples on CUDA, for which Transformer Engine has no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascend.changes import patch
from megascend.engines.megatron.cached_attention import AttentionSettings, attention_settings
from megascend.training.kernels import varlen


def install(chunks: Sequence[Any], config: Any) -> None:
    """Patch core attention of packed samples in ``chunks``; padded ones have Transformer Engine's kernels."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        core, settings = layer.self_attention.core_attention, attention_settings(layer, config)
        forward = partial(_attend, settings, core.forward)
        patch(core, "forward", forward, "Transformer Engine has no kernel with sinks for packed samples")


def _attend(
    settings: AttentionSettings,
    forward: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute core attention of [rows, heads, head dim]; [rows, heads * head dim]."""
    params = kwargs.get("packed_seq_params")
    if params is None or params.qkv_format != "thd":
        return forward(query, key, value, *args, **kwargs)
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    starts = params.cu_seqlens_q, params.cu_seqlens_kv
    longest = torch.tensor([params.max_seqlen_q, params.max_seqlen_kv])
    return varlen.attention(q, k, v, *starts, longest, *settings)[0].transpose(0, 1).flatten(1)
