"""One call of the fused attention: its options, its checks, and both directions on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.attention_layout import Layout, read_layout
from simnpu.operators.attention_mask import BAND_LEFT_UP, DENSE, RIGHT_DOWN_BAND, hidden_keys
from simnpu.operators.dispatch import random_generator, to_host
from simnpu.operators.refusal import Refusal

NOTHING_SEEN = torch.finfo(torch.float32).min  # row maximum of a query that sees no key


@dataclass(frozen=True)
class Block:
    """One attention problem. ``keep_mask`` is the dropout mask divided by the probability of keeping."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None
    bias: Tensor | None
    keep_mask: Tensor | None
    scale: float
    bias_before_scale: bool = False
    hidden_score: float = float("-inf")

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
        return scores if self.hidden is None else scores.masked_fill(self.hidden, self.hidden_score)

    def dropped(self, values: Tensor) -> Tensor:
        return values if self.keep_mask is None else values * self.keep_mask


def shared(tensor: Tensor, group: int) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def summed(gradient: Tensor, group: int) -> Tensor:
    """Gradients of repeated heads added up; the inverse direction of :func:`shared`."""
    return gradient if group == 1 else gradient.unflatten(1, (-1, group)).sum(2)


def attend(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Output [batch, heads, Sq, value dim], and the row maximum and row sum of the softmax [batch, heads, Sq, 1].

    A query that sees no key gets zeros, the lowest maximum and the sum 0: it weighs nothing when parts are merged. With a
    finite ``hidden_score`` it gets the mean of all values: the kernel looks for such queries in some modes only.
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


PSE_BEFORE_SCALE, PSE_AFTER_SCALE = 0, 1
GUARDED = 2  # inner_precise: look for queries that see no key
Lengths = Sequence[int] | None


@dataclass(frozen=True)
class AttentionOptions:
    """Arguments of a call other than its differentiable tensors. ``seed`` and ``offset`` fix the dropout."""

    head_num: int
    input_layout: str
    atten_mask: Tensor | None
    scale: float
    keep_prob: float
    pre_tokens: int
    next_tokens: int
    prefix: Lengths
    actual_seq_qlen: Lengths
    actual_seq_kvlen: Lengths
    sparse_mode: int
    pse_type: int
    softmax_layout: str
    inner_precise: int
    seed: int = 0
    offset: int = 0

    def on_host(self) -> AttentionOptions:
        """Return the options with the mask on the CPU."""
        return replace(self, atten_mask=to_host(self.atten_mask))


class Problem(NamedTuple):
    """A checked call: its layout and its blocks."""

    layout: Layout
    blocks: list[Block]
    numels: int  # elements of the dropout mask


def read_call(query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, options: AttentionOptions) -> Problem:
    """Check a call as the operator and the kernel do, and take it apart."""
    packed = options.input_layout.upper() == "TND"
    kernel = "aclnnFlashAttentionVarLenScore" if packed else "aclnnFlashAttentionScore"
    refuse = Refusal("npu_fusion_attention", kernel)
    if not 0 < options.keep_prob <= 1:
        refuse(f"The keep_prob value must be in range of (0, 1], but got {options.keep_prob}")
    if options.softmax_layout not in ("", "TND"):
        refuse("only supported softmax_layout=TND")
    if options.softmax_layout and not packed:
        refuse("softmax_layout=TND only supported when input_layout_str=TND")
    if options.inner_precise not in (0, 1, GUARDED):
        refuse.kernel(f"inner_precise must be 0, 1 or 2, but got {options.inner_precise}")
    dtypes = [str(tensor.dtype) for tensor in (query, key, value, pse) if tensor is not None]
    if len(set(dtypes)) > 1:
        refuse.kernel(f"query, key, value and pse must have one dtype, but got {', '.join(dtypes)}")
    layout = read_layout(
        query,
        key,
        value,
        options.head_num,
        options.input_layout,
        options.actual_seq_qlen,
        options.actual_seq_kvlen,
        refuse,
    )
    hidden = hidden_keys(
        layout,
        options.atten_mask,
        options.sparse_mode,
        options.pre_tokens,
        options.next_tokens,
        options.prefix,
        refuse,
    )
    check_pse(layout, pse, options, refuse)
    queries = layout.split(query, layout.heads, layout.q_lengths)
    keys = layout.split(key, layout.kv_heads, layout.kv_lengths)
    values = layout.split(value, layout.kv_heads, layout.kv_lengths)
    sizes = [(q.shape[0], q.shape[1], q.shape[2], k.shape[2]) for q, k in zip(queries, keys, strict=True)]
    keep_mask = dropout(sizes, options)
    bias = None if pse is None else pse.float()
    guarded = options.inner_precise == GUARDED or options.sparse_mode not in DENSE
    hidden_score = float("-inf") if guarded else NOTHING_SEEN
    blocks = [
        Block(q, k, v, h, bias, d, options.scale, options.pse_type == PSE_BEFORE_SCALE, hidden_score)
        for q, k, v, h, d in zip(queries, keys, values, hidden, keep_mask, strict=True)
    ]
    return Problem(layout, blocks, sum(b * n * s * t for b, n, s, t in sizes))


def check_pse(layout: Layout, pse: Tensor | None, options: AttentionOptions, refuse: Refusal) -> None:
    """Refuse position biases that are not simulated: only full ones of an unpacked call are."""
    if pse is None:
        return
    if options.pse_type not in (PSE_BEFORE_SCALE, PSE_AFTER_SCALE):
        raise NotSimulatedError(f"npu_fusion_attention with pse_type {options.pse_type} (ALiBi inside the kernel)")
    if options.sparse_mode in (RIGHT_DOWN_BAND, BAND_LEFT_UP):
        refuse.kernel(f"with sparse_mode {options.sparse_mode} pse is not supported")
    if layout.packed:
        raise NotSimulatedError("npu_fusion_attention with pse and input_layout TND")
    if pse.dim() != 4:
        refuse.kernel(f"pse dim should be 4, but got {pse.dim()}")
    if pse.shape[0] not in (1, layout.batch):
        refuse.kernel(f"pse batchsize should be 1 or {layout.batch}, but got {pse.shape[0]}")
    heads, rows, columns = pse.shape[1:]
    if rows == 1024 != layout.max_q:
        raise NotSimulatedError("npu_fusion_attention with a compressed ALiBi pse (last 1024 rows)")
    if heads != layout.heads or rows not in (1, layout.max_q) or columns != layout.max_kv:
        refuse.kernel(f"get unsupported pse shape, the shape is {list(pse.shape)}")


def dropout(sizes: list[tuple[int, int, int, int]], options: AttentionOptions) -> list[Tensor | None]:
    """Return for each block 1 / keep_prob where a weight is kept and 0 elsewhere; the same for the same seed and offset."""
    if options.keep_prob == 1:
        return [None] * len(sizes)
    generator = torch.Generator().manual_seed(options.seed + options.offset)
    return [(torch.rand(size, generator=generator) < options.keep_prob) / options.keep_prob for size in sizes]


def draw_seed(keep_prob: float, seed: int, offset: int) -> tuple[int, int]:
    """Draw seed and offset of one call's dropout from the device's random state; without dropout return the arguments.

    As in torch_npu, arguments do not choose the dropout: they go with a ``dropout_mask``.
    """
    return (seed, offset) if keep_prob == 1 else (int(torch.randint(2**31, (1,), generator=random_generator())), 0)


def forward(
    query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Output, softmax_max, softmax_sum, and the length of the dropout mask; CPU tensors."""
    layout, blocks, numels = read_call(query, key, value, pse, options)
    outputs, maxima, sums = zip(*(attend(block) for block in blocks), strict=True)
    return (
        layout.join(list(outputs), query.dtype),
        layout.join_statistics(list(maxima), options.softmax_layout),
        layout.join_statistics(list(sums), options.softmax_layout),
        numels,
    )


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse: Tensor | None,
    gradient: Tensor,
    output: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and pse; CPU tensors."""
    layout, blocks, _ = read_call(query, key, value, pse, options)
    parts = zip(
        blocks,
        layout.split(output, layout.heads, layout.q_lengths),
        layout.split(gradient, layout.heads, layout.q_lengths),
        layout.split_statistics(softmax_max, options.softmax_layout),
        layout.split_statistics(softmax_sum, options.softmax_layout),
        strict=True,
    )
    d_query, d_key, d_value, d_bias = zip(*(attend_backward(*part) for part in parts), strict=True)
    return (
        layout.join(list(d_query), query.dtype),
        layout.join(list(d_key), key.dtype),
        layout.join(list(d_value), value.dtype),
        None if pse is None else d_bias[0].sum_to_size(pse.shape).to(pse.dtype),
    )
