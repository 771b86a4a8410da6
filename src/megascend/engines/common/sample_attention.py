"""Causal attention of packed samples, each by itself, and of samples that share prefixes, for every engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megascend.reference.attention_sinks import attention_with_sinks
from megascend.training.kernels import npu, varlen
from megascend.training.kernels.prefix_attention import PrefixLayout


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefixes: PrefixLayout,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of samples that share prefixes, without dropout.

    Args:
        query: [1, heads, rows, head dim]; ``key`` and ``value``, of the same rows, may have fewer heads.
        window: tokens that each token attends to, itself included; None: all before it.
        sinks: [heads], see :func:`attention_with_sinks`.

    Returns:
        [1, heads, rows, head dim].
    """

    def compute(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if query.device.type == "npu":
            assert sinks is None, "engines refuse sinks on NPUs"
            lengths = prefixes.queries, prefixes.keys
            return npu.causal_attention(query, keys, values, *lengths, scaling=scaling, window=window)
        if varlen.available(query.device, query.dtype) and varlen.fits(query, values, 0.0):
            starts = prefixes.query_starts, prefixes.key_starts
            return varlen.attention(query, keys, values, *starts, prefixes.longest, scaling, window, sinks)
        return one_by_one(query, keys, values, (prefixes.queries, prefixes.keys), scaling, 0.0, window, sinks)

    return prefixes.attend(query, key, value, compute, dim=2)


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    scaling: float | None,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of samples whose numbers of queries, their last tokens, and of keys are the ``lengths``."""
    queries, keys = lengths
    # One call a sample instead of a block-diagonal mask, which would cost the square of all tokens and rule out the flash kernel.
    parts = zip(query.split(queries, dim=2), key.split(keys, dim=2), value.split(keys, dim=2), strict=True)
    return torch.cat([causal(*part, scaling, dropout, window, sinks) for part in parts], dim=2)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of one sample in each row, whose queries are its last tokens."""
    length, mask = key.shape[2], None
    prefix = length - query.shape[2]
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    # SDPA has no argument for a window or a prefix, only a mask, which rules out its flash kernel: only where it matters.
    if sinks is not None or prefix or (window is not None and window < length):
        positions = torch.arange(length, device=query.device)
        distance = positions[prefix:, None] - positions[None, :]
        mask = (distance >= 0) & (distance < (window or length))
    if sinks is not None:
        return attention_with_sinks(query, key, value, mask, sinks, **options)
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, **options)
