"""Sums over context parallel ranks that a loss can differentiate through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextSum(torch.autograd.Function):
    """Sum over context parallel ranks in the forward pass, identity in the backward pass.

    Each rank's loss is the same function of the sum, and gradients are summed over the ranks later; passing the gradient
    through unchanged therefore counts every token once.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def context_sum(group: ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """What sums values over ``group``, differentiably; what leaves them as they are if there is none."""
    if group is None:
        return lambda values: values
    return lambda values: ContextSum.apply(values, group)
