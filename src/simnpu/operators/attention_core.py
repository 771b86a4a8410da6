"""The formula of the fused attention and its gradient, on blocks of [batch, heads, sequence, head dim] in float32.

The gradient starts from the row maximum and row sum of the softmax that it is given, not from its own: in ring attention
these come from the merged softmax over all key blocks (Liu et al., Ring Attention, arXiv:2310.01889; the formula is the
backward of FlashAttention, Dao et al., arXiv:2205.14135, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING_SEEN = torch.finfo(torch.float32).min  # row maximum of a query that sees no key


@dataclass(frozen=True)
class Block:
    """One attention problem. ``kept`` is the dropout mask divided by the probability of keeping."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None
    bias: Tensor | None
    kept: Tensor | None
    scale: float
    bias_before_scale: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.query.shape[1] // self.key.shape[1]

    def scores(self) -> Tensor:
        """Scaled products with bias and mask, [batch, heads, Sq, Skv]."""
        scores = self.query @ shared(self.key, self.group).transpose(-1, -2)
        if self.bias is not None and self.bias_before_scale:
            scores = scores + self.bias
        scores = scores * self.scale
        if self.bias is not None and not self.bias_before_scale:
            scores = scores + self.bias
        return scores if self.hidden is None else scores.masked_fill(self.hidden, float("-inf"))

    def dropped(self, values: Tensor) -> Tensor:
        return values if self.kept is None else values * self.kept


def shared(tensor: Tensor, group: int) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def summed(gradient: Tensor, group: int) -> Tensor:
    """Gradients of repeated heads added up; the inverse direction of :func:`shared`."""
    return gradient if group == 1 else gradient.unflatten(1, (-1, group)).sum(2)


def attend(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Output [batch, heads, Sq, value dim], and the row maximum and row sum of the softmax [batch, heads, Sq, 1].

    A query that sees no key gets zeros, the lowest maximum and the sum 0: it weighs nothing when parts are merged.
    """
    scores = block.scores()
    if scores.numel() == 0:  # MindSpeed's cumulative lengths begin with 0: an empty first sample
        maximum = scores.new_full((*scores.shape[:-1], 1), NOTHING_SEEN)
    else:
        maximum = scores.amax(-1, keepdim=True).clamp_min(NOTHING_SEEN)
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    output = block.dropped(weights) @ shared(block.value, block.group)
    return output / total.masked_fill(total == 0, 1.0), maximum, total


def attend_backward(
    block: Block, output: Tensor, gradient: Tensor, maximum: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, and of the bias before it is reduced to its shape."""
    weights = torch.exp(block.scores() - maximum) / total.masked_fill(total == 0, 1.0)
    d_value = summed(block.dropped(weights).transpose(-1, -2) @ gradient, block.group)
    d_weights = block.dropped(gradient @ shared(block.value, block.group).transpose(-1, -2))
    d_bias = weights * (d_weights - (gradient * output).sum(-1, keepdim=True))
    d_scores = d_bias * block.scale
    d_query = d_scores @ shared(block.key, block.group)
    d_key = summed(d_scores.transpose(-1, -2) @ block.query, block.group)
    return d_query, d_key, d_value, d_scores if block.bias_before_scale else d_bias
