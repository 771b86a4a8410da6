"""Fused experts by grouped products, all of them at once: trained ones, and frozen ones with adapters.

Trained ones are as transformers' ``grouped_mm``, with two differences that cost it time and memory:

- Rows are moved by a known permutation, so gradients come back by its inverse and are summed over a token's experts in one pass.
  Autograd's own way back from an index, ``index_put`` with accumulation, sorts the rows again, and adds in the rows' precision.
- A row's weight is applied before the last product, which is linear, to rows that are as wide as an expert's inner layer and not
  to those as wide as the model (30B-A3B: 768 and 2048 numbers), which need not be kept for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascend.kernels.token_rows import Moved
from megascend.lora.grouped import GroupedLinear, Segments

Experts = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(fused experts, states [n, h], each token's experts [n, k], their weights [n, k]) -> [n, h]."""


def known(module: Any) -> bool:
    """Check whether experts have a gate, and nothing beside it."""
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
    """Return the sum over each token's experts of weight times gated MLP. Waits for no device.

    Args:
        module: fused experts that are :func:`known`.
        hidden: [n, h].
        index, weights: [n, k], each token's experts and their weights.
        product: of [rows, in], [experts, in, out] and the end of each expert's rows, int32 [experts].

    Returns:
        [n, h], in the dtype of ``hidden``.
    """
    order, place, ends = permutation(index, module.num_experts)
    rows: Any = SpreadRows.apply(hidden, order, place, index.shape[1])
    up, down = (weight if module.is_transposed else weight.mT for weight in (module.gate_up_proj, module.down_proj))
    weight_of_row: Any = Moved.apply(weights.flatten(), order, place)
    inner = module._apply_gate(product(rows, up, ends)) * weight_of_row[:, None]
    made: Any = Moved.apply(product(inner, down, ends), place, order)
    return made.unflatten(0, (-1, index.shape[1])).sum(1).to(hidden.dtype)


def permutation(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of ``index`` [n, k] by their experts.

    Returns:
        int64 [n * k] which row stands at each place; its inverse; int32 [experts], where each expert's rows end.
    """
    expert, order = index.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(expert, torch.arange(experts, device=order.device), right=True, out_int32=True)
    return order, place, ends


class SpreadRows(torch.autograd.Function):
    """[n, ...] to [n * k, ...], every row ``k`` times, in ``order``; ``place`` is its inverse."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return values.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = grads[0].index_select(0, *ctx.saved_tensors)
        return back.unflatten(0, (-1, ctx.k)).sum(1), None, None, None


@dataclass(frozen=True)
class SortedRows:
    """The rows that experts compute, those of the first expert first. A token has one for each of its experts.

    Attributes:
        token: int64 [rows], of the tokens that came in.
        expert: int64 [rows].
        segments: of each expert.
    """

    token: Tensor
    expert: Tensor
    segments: Segments


Addition = Callable[[str, SortedRows, Tensor, Tensor], Tensor]
"""(parameter's name, rows, input [rows, in], product [rows, out]) -> the product with what is added to it."""


def frozen_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, add: Addition) -> Tensor:
    """Return the sum over each token's experts of weight times gated MLP, with something added to each product.

    The experts' parameters get no gradient. Waits for no device where there is a kernel for grouped products.

    Args:
        module: fused experts with a gate, [experts, out, in] or transposed.
        hidden: [n, h].
        index, weights: [n, k], each token's experts and their weights.
    """
    count = index.shape[1]
    order, place, ends = permutation(index, module.num_experts)
    rows = SortedRows(order // count, index.flatten()[order], Segments(ends))
    states: Any = SpreadRows.apply(hidden, order, place, count)
    up = add("gate_up_proj", rows, states, _product(module, "gate_up_proj", rows, states))
    states = module._apply_gate(up)
    down = add("down_proj", rows, states, _product(module, "down_proj", rows, states))
    if getattr(module, "has_post_expert_norm", False):
        down = module.post_expert_norm(down)
    weight_of_row: Any = Moved.apply(weights.flatten(), order, place)
    made: Any = Moved.apply(down * weight_of_row[:, None], place, order)
    return made.unflatten(0, (-1, count)).sum(1).to(hidden.dtype)


def _product(module: Any, parameter: str, rows: SortedRows, states: Tensor) -> Tensor:
    weight: Tensor = getattr(module, parameter)
    if not getattr(module, "is_transposed", False):
        weight = weight.mT
    bias = None
    if getattr(module, "has_bias", False):
        bias = getattr(module, f"{parameter}_bias")[rows.expert]
    return GroupedLinear.apply(states, weight, None, rows.segments, bias)
