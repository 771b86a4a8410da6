"""Softmax attention of one block of queries, and the arithmetic of the zigzag context-parallel layout.

With context parallelism a sequence is cut into ``2 * size`` equal chunks, and rank ``r`` holds chunks ``r`` and
``2 * size - 1 - r``, which balances the work of the ranks under a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.attention_sinks import attention_with_sinks

Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)


def check_window(window: object) -> None:
    """Raise ConfigError unless ``window`` is None or a pair of integers, (left, right)."""
    if window is None or (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(type(side) is int for side in window)
    ):
        return
    raise ConfigError(f"window_size must be None or two integers (left, right), got {window!r}")


@dataclass(frozen=True)
class MaskRule:
    """Rule for the visible keys of a query, by position in its sequence.

    Attributes:
        causal: a query does not attend to keys after its own position.
        window: number of visible positions to the left and to the right; -1 is no limit.
        bottom_right: align the last query with the last key (else: the first with the first).
    """

    causal: bool
    window: Window = UNLIMITED
    bottom_right: bool = False

    @property
    def reach(self) -> Window:
        """Return the window, limited on the right by causality."""
        left, right = self.window
        return (left, 0) if self.causal else (left, right)


def visibility_mask(rule: MaskRule, queries: int, keys: int, offset: int, device: torch.device) -> Tensor | None:
    """Return bool ``[queries, keys]``, True if visible, or None if all are; ``offset``: position of the first query."""
    left, right = rule.reach
    last = offset + queries - 1
    if (left < 0 or last <= left) and (right < 0 or offset + right >= keys - 1):
        return None
    distance = torch.arange(keys, device=device) - torch.arange(offset, offset + queries, device=device)[:, None]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        # Distance is the key's position minus the query's: the past is negative.
        keep &= distance >= -left
    if right >= 0:
        keep &= distance <= right
    return keep


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    scale: float,
    dropout: float = 0.0,
    offset: int = 0,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute attention with an fp32 softmax; groups of query heads share K and V heads.

    Args:
        query: ``[batch, heads, queries, dim]``.
        key, value: ``[batch, kv_heads, keys, dim]`` and ``[batch, kv_heads, keys, value_dim]``; their first row is
            position 0 of the sequence.
        offset: position of the first query.
        keep: boolean, broadcastable to ``[batch, heads, queries, keys]``, True where allowed; in addition to ``rule``.
        bias: added to the scaled scores, broadcastable to the same shape.
        sink: ``[heads]``, a logit that takes part in the softmax and has no value: what is left over attends to nothing.

    Returns:
        ``[batch, heads, queries, value_dim]`` in the dtype of ``value``. A query without visible keys gets zeros.
    """
    queries, keys = query.shape[2], key.shape[2]
    if keys == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    if value.shape[3] < key.shape[3]:
        # torch has no kernel for narrower values on CPUs and would save all probabilities.
        width = value.shape[3]
        value = F.pad(value, (0, key.shape[3] - width))
        return attend(query, key, value, rule, scale, dropout, offset, keep, bias, sink)[..., :width]
    kwargs = {"scale": scale, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    aligned = offset == 0 and queries == keys
    if rule.reach == (-1, 0) and aligned and keep is None and bias is None and sink is None:
        # Without a mask tensor torch may choose a fused kernel, which skips masked blocks.
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **kwargs)
    position_mask = visibility_mask(rule, queries, keys, offset, query.device)
    if position_mask is not None:
        keep = position_mask if keep is None else keep & position_mask
    if sink is not None:
        return attention_with_sinks(query, key, value, keep, sink, bias, **kwargs)
    has_key = None
    if keep is not None:
        # A row without any key would be 0 / 0: make all keys visible, then set its output (and its gradient) to zero.
        has_key = keep.any(dim=-1, keepdim=True)
        keep = keep | ~has_key
    mask = keep
    if bias is not None:
        mask = bias.to(query.dtype)
        if keep is not None:
            mask = mask.masked_fill(~keep, float("-inf"))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **kwargs)
    return out if has_key is None else out.masked_fill(~has_key, 0.0)


def chunk_starts(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return (first position, tokens) of a rank's chunks of a sequence.

    ``length`` must be a multiple of ``2 * size`` if ``size > 1``.
    """
    if size == 1:
        return [(0, length)]
    chunk = length // (2 * size)
    return [(rank * chunk, chunk), ((2 * size - 1 - rank) * chunk, chunk)]


def unzigzag(gathered: Tensor, start: int, local: int) -> Tensor:
    """Return a full sequence ``[size * local, ...]`` in order, from ``gathered`` ``[size, local_total, ...]`` in rank order."""
    size, half = gathered.shape[0], local // 2
    if size == 1:
        return gathered[0, start : start + local]
    first = [gathered[rank, start : start + half] for rank in range(size)]
    # Reversed: the last chunk is rank 0's.
    second = [gathered[rank, start + half : start + local] for rank in reversed(range(size))]
    return torch.cat(first + second)
