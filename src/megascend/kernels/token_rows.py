"""Rows of tokens in the order of their experts: moved by indices that stay on the device, and added up again in one pass.

Nothing here waits for the device: the number of rows is known beforehand, and where they come from need not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRows:
    """One row for each expert of each token, by expert and then by token.

    Attributes:
        token: int64 [tokens * k], whose row it is.
        choice: int64 [tokens * k], which number of a flat [tokens * experts] belongs to the row.
        place: int64 [tokens, k], where each token's rows are, by expert.
    """

    token: Tensor
    choice: Tensor
    place: Tensor


def token_rows(routing_map: Tensor, k: int) -> TokenRows:
    """Return the rows of a routing map, bool [tokens, experts] with ``k`` set in each row; else an assertion fails on the
    device.
    """
    tokens, experts = routing_map.shape
    by_expert = routing_map.T.reshape(-1)
    rank = by_expert.cumsum(0, dtype=torch.int32) - 1
    torch._assert_async(rank[-1] == tokens * k - 1, f"tokens must have {k} experts each")
    found = torch.nonzero_static(by_expert, size=tokens * k).view(-1)
    expert = found.div(tokens, rounding_mode="floor")
    token = found - expert * tokens
    by_token = torch.nonzero_static(routing_map.reshape(-1), size=tokens * k).view(-1)
    place = rank.view(experts, tokens).T.reshape(-1).index_select(0, by_token).view(tokens, k)
    return TokenRows(token, token * experts + expert, place.long())


def chunk_order(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order, and its inverse, int64 [rows], from rows by (source, expert) to rows by (expert, source).

    ``counts``: int [sources, experts], rows of each chunk; ``rows``: their sum.
    """
    counts = counts.long()
    start = (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view(counts.shape).T.reshape(-1)
    sizes = counts.T.reshape(-1)
    ends = sizes.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    chunk = torch.searchsorted(ends, row, right=True)
    order = row + (start - ends + sizes).index_select(0, chunk)
    return order, torch.empty_like(order).scatter_(0, order, row)


def gather_sum(values: Tensor, place: Tensor) -> Tensor:
    """The sum of ``values[place[t]]`` for each t: [rows, h] and int64 [tokens, k] to [tokens, h], added in fp32."""
    if values.is_cuda and values.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from megascend.kernels.gather_sum_triton import gather_sum as kernel

        return kernel(values, place)
    return values.index_select(0, place.reshape(-1)).unflatten(0, place.shape).sum(1)


class Spread(torch.autograd.Function):
    """[tokens, h] to [rows, h]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return values.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_sum(grads[0].contiguous(), *ctx.saved_tensors), None, None


class Combine(torch.autograd.Function):
    """[rows, h] to [tokens, h], the sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return gather_sum(values.contiguous(), place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


class Moved(torch.autograd.Function):
    """``values[order]`` by a permutation, whose inverse is ``place``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
