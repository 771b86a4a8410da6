"""Fused experts as grouped products over all experts at once: trained ones, and frozen ones with adapters.

Trained experts are computed as in transformers' ``grouped_mm``, with two differences that save time and memory:

- Rows are moved by a known permutation, so gradients are moved by its inverse and summed over a token's experts in one pass.
  Autograd's gradient of indexing, ``index_put`` with accumulation, sorts the rows again, and adds in the rows' precision.
- A row's routing weight is applied before the down projection, which is linear: to rows as wide as an expert's inner layer, not
  to rows as wide as the model (30B-A3B: 768 and 2048), which then need not be stored for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascend.training.kernels.token_rows import Permutation
from megascend.training.lora.grouped import SegmentedLinear, Segments

Experts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(fused experts, states [n, h], each token's experts [n, k], their weights [n, k]) -> [n, h]."""


def is_plain_gated(module: Any) -> bool:
    """Check whether experts are plain gated MLPs: no biases, no norm, not distributed by transformers."""
    return bool(module.has_gate) and not (
        getattr(module, "has_bias", False)
        or getattr(module, "has_post_expert_norm", False)
        or getattr(module, "_is_expert_parallel", False)
    )


def grouped_experts(
    module: Any,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute the sum over each token's experts of weight times gated MLP. Does not wait for the device.

    Args:
        module: fused experts for which :func:`is_plain_gated` is true.
        hidden: [n, h].
        index, weights: [n, k], each token's experts and their weights.
        product: grouped product of [rows, in] and [experts, in, out], given the end of each expert's rows, int32 [experts].

    Returns:
        [n, h], in the dtype of ``hidden``.
    """
    order, inverse, ends = permutation(index, module.num_experts)
    rows: Any = SpreadRows.apply(hidden, order, inverse, index.shape[1])
    up, down = (weight if module.is_transposed else weight.mT for weight in (module.gate_up_proj, module.down_proj))
    row_weights: Any = Permutation.apply(weights.flatten(), order, inverse)
    inner = module._apply_gate(product(rows, up, ends)) * row_weights[:, None]
    outputs: Any = Permutation.apply(product(inner, down, ends), inverse, order)
    return outputs.unflatten(0, (-1, index.shape[1])).sum(1).to(hidden.dtype)


def permutation(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of ``index`` [n, k] by their experts.

    Returns:
        int64 [n * k], the row at each sorted position; its inverse; int32 [experts], the end of each expert's rows.
    """
    # Stable: an expert's rows keep the order of their tokens, so sums over them are reproducible.
    expert, order = index.flatten().sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    # Not bincount, which waits for the device.
    ends = torch.searchsorted(expert, torch.arange(experts, device=order.device), right=True, out_int32=True)
    return order, inverse, ends


class SpreadRows(torch.autograd.Function):
    """Repeat every row ``k`` times, [n, ...] to [n * k, ...], in ``order``, whose inverse is ``inverse``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        # The gradient moves rows back by the inverse; it needs no activations.
        ctx.save_for_backward(inverse)
        ctx.k = k
        return values.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        by_token = grads[0].index_select(0, *ctx.saved_tensors)
        return by_token.unflatten(0, (-1, ctx.k)).sum(1), None, None, None


@dataclass(frozen=True)
class SortedRows:
    """Rows sorted by expert. A token has one row for each of its experts.

    Attributes:
        token: int64 [rows], index of the row's token.
        expert: int64 [rows].
        segments: the rows of each expert.
    """

    token: Tensor
    expert: Tensor
    segments: Segments


Addition = Callable[[str, SortedRows, Tensor, Tensor], Tensor]
"""(parameter's name, rows, input [rows, in], product [rows, out]) -> product plus an addend [rows, out]."""


def frozen_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, add: Addition) -> Tensor:
    """Compute the sum over each token's experts of weight times gated MLP, with ``add`` applied to each product.

    The experts' parameters get no gradient. With a kernel for grouped products it does not wait for the device.

    Args:
        module: fused experts with a gate, [experts, out, in] or transposed.
        hidden: [n, h].
        index, weights: [n, k], each token's experts and their weights.
    """
    count = index.shape[1]
    order, inverse, ends = permutation(index, module.num_experts)
    rows = SortedRows(order // count, index.flatten()[order], Segments(ends))
    states: Any = SpreadRows.apply(hidden, order, inverse, count)
    up = add("gate_up_proj", rows, states, _product(module, "gate_up_proj", rows, states))
    states = module._apply_gate(up)
    down = add("down_proj", rows, states, _product(module, "down_proj", rows, states))
    if getattr(module, "has_post_expert_norm", False):
        down = module.post_expert_norm(down)
    # Weighted only here, unlike in grouped_experts: a norm after the down projection is not linear.
    row_weights: Any = Permutation.apply(weights.flatten(), order, inverse)
    outputs: Any = Permutation.apply(down * row_weights[:, None], inverse, order)
    return outputs.unflatten(0, (-1, count)).sum(1).to(hidden.dtype)


def _product(module: Any, parameter: str, rows: SortedRows, states: Tensor) -> Tensor:
    weight: Tensor = getattr(module, parameter)
    if not getattr(module, "is_transposed", False):
        weight = weight.mT
    bias = None
    if getattr(module, "has_bias", False):
        bias = getattr(module, f"{parameter}_bias")[rows.expert]
    return SegmentedLinear.apply(states, weight, None, rows.segments, bias)
