"""The fused attention in the layouts and sparse modes that megascend and MindSpeed call, against an explicit softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npu_acceptance.compare import Case, Tensors, normal

HEADS, KV_HEADS, DIM = 4, 2, 64
COMPRESSED = 2048
"""Side of the triangle that stands for every causal mask in modes 2, 3 and 4."""
UNLIMITED = 2147483647

Hide = Callable[[int, int], Tensor | None]
"""From the numbers of queries and keys: True where a key is hidden from a query; None where nothing is."""


@dataclass(frozen=True)
class Call:
    """Arguments of an attention call apart from its tensors.

    Attributes:
        mode: ``sparse_mode``.
        mask: the kind of mask: the compressed triangle, the whole mask, or none.
        hide: the keys that the mask hides.
    """

    layout: str
    mode: int
    mask: str
    hide: Hide
    pre: int = UNLIMITED
    following: int = UNLIMITED


def hidden_outside(queries: int, keys: int, before: int | None, after: int, shift: int) -> Tensor:
    """Hide keys further than ``before`` before, or ``after`` after, a query's position plus ``shift``."""
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - shift
    hidden = distance > after
    return hidden if before is None else hidden | (-distance > before)


def causal(queries: int, keys: int) -> Tensor:
    """Hide future keys, counted from the upper left."""
    return hidden_outside(queries, keys, None, 0, 0)


def causal_at_end(queries: int, keys: int) -> Tensor:
    """Hide future keys, counted from the lower right: the last query sees the last key."""
    return hidden_outside(queries, keys, None, 0, keys - queries)


def band(before: int, after: int) -> Hide:
    """Build a band mask around the diagonal that ends in the lower right."""
    return lambda queries, keys: hidden_outside(queries, keys, before, after, keys - queries)


def nothing(queries: int, keys: int) -> None:
    """Hide no key."""


CALLS = (
    Call("SBH", 2, "triangle", causal, 65536, 0),  # MindSpeed's, and megascend's through it
    Call("BSH", 2, "triangle", causal, 65536, 0),
    Call("BNSD", 2, "triangle", causal, 65536, 0),
    Call("BSND", 2, "triangle", causal, 65536, 0),
    Call("SBH", 3, "triangle", causal_at_end, 65536, 0),  # the diagonal step of ring attention, and all_gather
    Call("SBH", 0, "none", nothing),  # the ring's other steps
    Call("BNSD", 3, "triangle", causal_at_end, 65536, 0),
    Call("BNSD", 0, "none", nothing),
    Call("SBH", 1, "whole", causal),  # a general mask
    Call("BNSD", 0, "whole", causal, 65536, 0),
    Call("BSH", 4, "triangle", band(40, 8), 40, 8),
)
PACKED = (
    Call("TND", 2, "triangle", causal, 65536, 0),
    Call("TND", 3, "triangle", causal_at_end, 65536, 0),
    Call("TND", 0, "none", nothing),
)
LENGTHS = (33, 1, 96, 62)


def cases(quick: bool) -> Iterator[Case]:
    """Yield all cases, or a few of them if ``quick``."""
    for call in CALLS[:5:2] if quick else CALLS:
        yield plain_case(call, batch=2, queries=128, keys=128)
    for call in PACKED[:1] if quick else PACKED:
        yield packed_case(call)
    yield gradient_case(CALLS[4])
    if quick:
        return
    yield plain_case(CALLS[4], batch=1, queries=96, keys=160)
    # Longer than the compressed mask, which the kernel then reads repeatedly.
    yield replace(plain_case(CALLS[0], batch=1, queries=2304, keys=2304, dim=128), dtypes=(torch.bfloat16,))
    yield gradient_case(CALLS[5])
    yield merge_case()


def scale(dim: int) -> float:
    return 1 / math.sqrt(dim)


def attention_mask(call: Call, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Build ``atten_mask`` of the call."""
    if call.mask == "none":
        return None
    if call.mask == "triangle":
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1).to(device)
    hidden = call.hide(queries, keys)
    return None if hidden is None else hidden.to(device)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(d)) v of [batch, heads, sequence, dim], and log(sum(exp(scores))) [batch, heads, sequence]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale(query.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def to_layout(tensor: Tensor, layout: str) -> Tensor:
    """Convert [batch, heads, sequence, dim] to the layout of a call."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2).contiguous()
    return tensor.permute(2, 0, 1, 3).flatten(2).contiguous()


def from_layout(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """Convert a tensor in a call's layout back to [batch, heads, sequence, dim]."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    split = tensor.unflatten(-1, (heads, -1))
    return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)


def draw(generator: torch.Generator, batch: int, queries: int, keys: int, dim: int) -> Tensors:
    return {
        "query": normal(generator, batch, HEADS, queries, dim),
        "key": normal(generator, batch, KV_HEADS, keys, dim),
        "value": normal(generator, batch, KV_HEADS, keys, dim),
    }


def call_forward(npu: Any, call: Call, tensors: Tensors) -> Any:
    """Return the operator's outputs: the attention in the call's layout, the softmax's maximum and sum, and more."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    return npu.npu_fusion_attention(
        *(to_layout(tensor, call.layout) for tensor in (query, key, value)),
        HEADS,
        call.layout,
        atten_mask=attention_mask(call, query.shape[2], key.shape[2], query.device),
        scale=scale(query.shape[-1]),
        keep_prob=1.0,
        pre_tockens=call.pre,
        next_tockens=call.following,
        sparse_mode=call.mode,
    )


def log_sum(maximum: Tensor, total: Tensor) -> Tensor:
    """Return log(sum(exp(scores))) from the statistics [batch, heads, sequence, 8], whose last dimension holds copies."""
    return maximum[..., 0].float() + total[..., 0].float().log()


def plain_case(call: Call, batch: int, queries: int, keys: int, dim: int = DIM) -> Case:
    """Build a case that compares the output, its statistics and autograd's gradients."""

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        out, maximum, total, *_ = call_forward(npu, call, tensors)
        return {"attention": from_layout(out, call.layout, HEADS), "log sum": log_sum(maximum, total).detach()}

    def formula(tensors: Tensors) -> Tensors:
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        out, logs = softmax_attention(query, key, value, call.hide(queries, keys))
        return {"attention": out, "log sum": logs.detach()}

    name = f"fusion_attention {call.layout} mode {call.mode}, {call.mask} mask, {queries} x {keys}"
    inputs = partial(draw, batch=batch, queries=queries, keys=keys, dim=dim)
    return Case(name, inputs, operator, formula, leaves=("query", "key", "value"))


def packed_case(call: Call) -> Case:
    """Build a case of packed samples of several lengths."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()

    def inputs(generator: torch.Generator) -> Tensors:
        total = sum(LENGTHS)
        heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
        return {name: normal(generator, total, number, DIM) for name, number in heads.items()}

    def operator(npu: Any, tensors: Tensors) -> Tensor:
        return npu.npu_fusion_attention(
            tensors["query"],
            tensors["key"],
            tensors["value"],
            HEADS,
            "TND",
            atten_mask=attention_mask(call, max(LENGTHS), max(LENGTHS), tensors["query"].device),
            scale=scale(DIM),
            keep_prob=1.0,
            pre_tockens=call.pre,
            next_tockens=call.following,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=call.mode,
        )[0]

    def formula(tensors: Tensors) -> Tensor:
        parts = []
        for sample in zip(*(tensors[name].split(LENGTHS) for name in ("query", "key", "value")), strict=True):
            query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in sample)
            out, _ = softmax_attention(query, key, value, call.hide(query.shape[2], key.shape[2]))
            parts.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    name = f"fusion_attention TND mode {call.mode}, {call.mask} mask, samples of {', '.join(map(str, LENGTHS))}"
    return Case(name, inputs, operator, formula, leaves=("query", "key", "value"))


def gradient_case(call: Call) -> Case:
    """Build a case of ``npu_fusion_attention_grad``, called directly as ring attention does."""
    queries = keys = 128

    def inputs(generator: torch.Generator) -> Tensors:
        tensors = draw(generator, 2, queries, keys, DIM)
        return tensors | {"dy": normal(generator, 2, HEADS, queries, DIM)}

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        out, maximum, total, *_ = call_forward(npu, call, tensors)
        query = tensors["query"]
        gradients = npu.npu_fusion_attention_grad(
            *(to_layout(tensors[name], call.layout) for name in ("query", "key", "value", "dy")),
            HEADS,
            call.layout,
            atten_mask=attention_mask(call, queries, keys, query.device),
            softmax_max=maximum,
            softmax_sum=total,
            attention_in=out,
            scale_value=scale(DIM),
            keep_prob=1.0,
            pre_tockens=call.pre,
            next_tockens=call.following,
            sparse_mode=call.mode,
        )
        heads = (HEADS, KV_HEADS, KV_HEADS)
        names = ("gradient of query", "gradient of key", "gradient of value")
        return {
            name: from_layout(gradient, call.layout, count)
            for name, gradient, count in zip(names, gradients, heads, strict=False)
        }

    def formula(tensors: Tensors) -> Tensors:
        leaves = [tensors[name].clone().requires_grad_() for name in ("query", "key", "value")]
        out, _ = softmax_attention(leaves[0], leaves[1], leaves[2], call.hide(queries, keys))
        gradients = torch.autograd.grad(out, leaves, tensors["dy"])
        return dict(zip(("gradient of query", "gradient of key", "gradient of value"), gradients, strict=True))

    name = f"fusion_attention_grad {call.layout} mode {call.mode}, {call.mask} mask"
    return Case(name, inputs, operator, formula)


def merge_case() -> Case:
    """Build a case of ``npu_ring_attention_update``: attention over two halves of the keys, merged by their statistics."""
    unmasked = Call("SBH", 0, "none", nothing)
    keys = 128

    def operator(npu: Any, tensors: Tensors) -> Tensor:
        parts = []
        for part in range(2):
            rows = slice(part * keys // 2, (part + 1) * keys // 2)
            half = {name: tensors[name][:, :, rows] for name in ("key", "value")}
            parts += call_forward(npu, unmasked, {"query": tensors["query"]} | half)[:3]
        return from_layout(npu.npu_ring_attention_update(*parts)[0], "SBH", HEADS)

    def formula(tensors: Tensors) -> Tensor:
        return softmax_attention(tensors["query"], tensors["key"], tensors["value"], None)[0]

    inputs = partial(draw, batch=2, queries=64, keys=keys, dim=DIM)
    return Case("ring_attention_update", inputs, operator, formula, needs=("npu_ring_attention_update",))
