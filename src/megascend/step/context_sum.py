"""Sums over context parallel ranks that a loss can differentiate through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextSum(torch.autograd.Function):
    """Sum over context parallel ranks; a log-probability's gradient counts every value that depends on it, once.

    Values of pairs are the same on every rank, all made of the sums, so each rank's gradient of a sum is the whole one. Values of
    tokens are each rank's own, so the gradient of a sum is that of all ranks together.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup, per: Literal["token", "pair"]) -> Tensor:
        ctx.group, ctx.per = group, per
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grads[0], ctx.group) if ctx.per == "token" else grads[0], None, None


def _summed(values: Tensor, group: ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def context_sum(group: ProcessGroup | None, per: Literal["token", "pair"]) -> Callable[[Tensor], Tensor]:
    """What sums values over ``group``, differentiably; what leaves them as they are if there is none.

    Args:
        per: what the loss has a value of.
    """
    if group is None:
        return lambda values: values
    return lambda values: ContextSum.apply(values, group, per)
