"""Permutation of tokens into the order of their experts, by indices that stay on the device, and the sum of their results.

Nothing here synchronizes with the device: only the number of rows has to be known on the host, not their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRows:
    """Indices of the rows, one for each expert of each token, sorted by expert and then by token.

    Attributes:
        token: int64 [tokens * k], token of each row.
        choice: int64 [tokens * k], index of each row's value in a flat [tokens * experts].
        row_index: int64 [tokens, k], rows of each token, in the order of experts.
    """

    token: Tensor
    choice: Tensor
    row_index: Tensor


def token_rows(routing_map: Tensor, k: int) -> TokenRows:
    """Return the rows of a routing map, bool [tokens, experts] with ``k`` entries set in each row.

    An assertion on the device fails if the total is wrong.
    """
    tokens, experts = routing_map.shape
    # Expert first, so that the running count is a row's position in the order of experts.
    by_expert = routing_map.T.reshape(-1)
    rank = by_expert.cumsum(0, dtype=torch.int32) - 1
    torch._assert_async(rank[-1] == tokens * k - 1, f"tokens must have {k} experts each")
    # nonzero_static does not synchronize, unlike nonzero, whose output size depends on the values.
    selected = torch.nonzero_static(by_expert, size=tokens * k).view(-1)
    expert = selected.div(tokens, rounding_mode="floor")
    token = selected - expert * tokens
    by_token = torch.nonzero_static(routing_map.reshape(-1), size=tokens * k).view(-1)
    row_index = rank.view(experts, tokens).T.reshape(-1).index_select(0, by_token).view(tokens, k)
    return TokenRows(token, token * experts + expert, row_index.long())


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
    # A row keeps its place within its chunk: the source index differs by the distance between the chunk's two starts.
    order = row + (start - ends + sizes).index_select(0, chunk)
    return order, torch.empty_like(order).scatter_(0, order, row)


def gather_sum(values: Tensor, row_index: Tensor) -> Tensor:
    """Sum ``values[row_index[t]]`` for each token t in fp32: [rows, h] and int64 [tokens, k] to [tokens, h]."""
    if values.device.type == "cuda" and values.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from megascend.training.kernels.gather_sum_triton import gather_sum as kernel

        return kernel(values, row_index)
    return values.index_select(0, row_index.reshape(-1)).unflatten(0, row_index.shape).sum(1)


class Spread(torch.autograd.Function):
    """Copy each token to its rows: [tokens, h] to [rows, h]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, row_index: Tensor) -> Tensor:
        ctx.save_for_backward(row_index)
        return values.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Autograd may pass an expanded gradient, that of a sum for example.
        return gather_sum(grads[0].contiguous(), *ctx.saved_tensors), None, None


class Combine(torch.autograd.Function):
    """Sum of each token's rows: [rows, h] to [tokens, h]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, row_index: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return gather_sum(values.contiguous(), row_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


class Permutation(torch.autograd.Function):
    """Permutation ``values[order]``; ``inverse`` is that of ``order``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
