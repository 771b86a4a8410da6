"""Softmax attention with sinks: a logit of each head that takes part in the softmax and has no value (gpt-oss)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    sinks: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` with a key more, of score 0 plus the sink's logit and value 0.

    Args:
        query: [batch, heads, queries, d]; ``key`` and ``value`` may have fewer heads (``enable_gqa``).
        visible: bool, broadcastable to [batch, heads, queries, keys], True where a query attends to a key; None: to all. A query
            that sees no key gets zeros.
        sinks: logits, broadcastable to [batch, heads, queries, 1]; [heads] is taken as [1, heads, 1, 1].
        bias: added to the scaled scores, broadcastable as ``visible``.
        options: keyword arguments of ``scaled_dot_product_attention``.
    """
    rows = query.shape[:3]
    scores = query.new_zeros(1, 1, rows[2], key.shape[2]) if bias is None else bias.to(query.dtype)
    if visible is not None:
        scores = torch.where(visible, scores, float("-inf"))
    logits = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
    mask = torch.cat([scores.expand(*rows, -1), logits.to(query.dtype).expand(*rows, 1)], dim=-1)
    key, value = (F.pad(states, (0, 0, 0, 1)) for states in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, **options)
