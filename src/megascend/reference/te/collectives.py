"""Differentiable collectives of tensor and context parallelism.

The backward pass of each is its transpose: identity / all-reduce, all-gather / reduce-scatter. All act on the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Any]


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: all_reduce writes in place, and autograd may still need the argument.
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``[n, ...]`` of every rank to ``[size * n, ...]`` in rank order."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # Collectives read memory in order, and the input may be a transposed view.
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``[size * n, ...]`` over the ranks; return this rank's slice ``[n, ...]``."""
    scattered = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(scattered, x.contiguous(), group=group)
    return scattered


class _CopyToRanks(torch.autograd.Function):
    """Return ``x``; sum the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce ``x``; pass the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherFromRanks(torch.autograd.Function):
    """All-gather ``[n, ...]`` -> ``[size * n, ...]``; reduce-scatter the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.group), None


class _SumAndScatter(torch.autograd.Function):
    """Reduce-scatter ``[size * n, ...]`` -> ``[n, ...]``; all-gather the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gather(grad, ctx.group), None


copy_to_ranks: Collective = _CopyToRanks.apply
sum_over_ranks: Collective = _SumOverRanks.apply
gather_from_ranks: Collective = _GatherFromRanks.apply
sum_and_scatter: Collective = _SumAndScatter.apply
