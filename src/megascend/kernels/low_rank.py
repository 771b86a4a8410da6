"""What adapters of the output layer add to a chunk of logits, and the gradients of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RANK = 256
"""Largest rank, all slices of a fused layer together, that the kernels of :mod:`megascend.kernels.low_rank_triton` take."""


@dataclass(frozen=True)
class LowRank:
    """``down @ up[number]`` for every segment of tokens, added to their logits. Tokens in no segment get nothing.

    ``down`` [n, r] comes with every call; it is what autograd sees. The gradient of ``up`` goes straight into ``grads``, as
    that of the adapters in linear layers does.

    Attributes:
        up: [matrices, r, rows], in the model's precision; rows are those of this rank's vocabulary that stand for real tokens.
        grads: float32, of the same shape.
        segments: (number of the matrix, its tokens).
    """

    up: Tensor
    grads: Tensor
    segments: tuple[tuple[int, slice], ...]

    def add_(self, logits: Tensor, down: Tensor, part: slice) -> None:
        """Add to ``logits`` [tokens of part, at least rows], in place."""
        for number, segment in self._within(part):
            logits[segment.start - part.start : segment.stop - part.start, : self.up.shape[2]].addmm_(
                down[segment], self.up[number]
            )

    def propagate(self, grad_logits: Tensor, down: Tensor, grad_down: Tensor, part: slice) -> None:
        """From the gradient of a chunk's logits to those of ``up``, added up, and of ``down``, written to ``grad_down``."""
        for number, segment in self._within(part):
            grad = grad_logits[segment.start - part.start : segment.stop - part.start]
            torch.mm(grad, self.up[number].t(), out=grad_down[segment])
            add_product_(self.grads[number], down[segment].t(), grad)

    def _within(self, part: slice) -> Iterator[tuple[int, slice]]:
        for number, segment in self.segments:
            start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
            if start < stop:
                yield number, slice(start, stop)


def add_product_(into: Tensor, left: Tensor, right: Tensor) -> None:
    """``into += left @ right``, float32 whatever the factors are, and in one kernel where there is one."""
    if not into.numel():
        return
    if left.dtype == torch.float32:
        into.addmm_(left, right)
    elif left.device.type == "cuda":
        torch.addmm(into, left, right, out_dtype=torch.float32, out=into)
    else:
        into += torch.mm(left, right)
