"""LoRA adapters of the output layer: their contribution to a chunk of logits, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_RANK = 256
"""Largest rank, summed over the slices of a fused layer, that :mod:`megascend.training.kernels.low_rank_triton` supports."""


@dataclass(frozen=True)
class LowRank:
    """Low-rank term ``down @ up[number]`` that is added to the logits of every segment of tokens.

    Tokens outside all segments are unchanged. ``down`` [n, r] is an argument of every call, and the only tensor that autograd
    sees: the gradient of ``up`` is added to ``grads`` directly, as for adapters of linear layers.

    Attributes:
        up: [matrices, r, rows], in the model's precision; rows of this rank's vocabulary shard without padding.
        grads: float32, of the same shape.
        segments: (index of the matrix, its tokens).
    """

    up: Tensor
    grads: Tensor
    segments: tuple[tuple[int, slice], ...]

    def add_(self, logits: Tensor, down: Tensor, part: slice) -> None:
        """Add the term to ``logits`` [tokens of part, at least rows], in place."""
        for number, segment in self._segments_in(part):
            logits[segment.start - part.start : segment.stop - part.start, : self.up.shape[2]].addmm_(
                down[segment], self.up[number]
            )

    def propagate(self, grad_logits: Tensor, down: Tensor, grad_down: Tensor, part: slice) -> None:
        """Backpropagate the gradient of a chunk's logits: add that of ``up`` to ``grads``, write that of ``down``."""
        for number, segment in self._segments_in(part):
            grad = grad_logits[segment.start - part.start : segment.stop - part.start]
            torch.mm(grad, self.up[number].t(), out=grad_down[segment])
            add_product_(self.grads[number], down[segment].t(), grad)

    def select(self, rows: Tensor) -> LowRank:
        """Return the term of ``rows``, int64 [m], which are in the order of the segments. Waits for the device."""
        borders = [border for _, segment in self.segments for border in (segment.start, segment.stop)]
        before = (rows[:, None] < rows.new_tensor(borders)).sum(0).tolist()
        slices = map(slice, before[::2], before[1::2])
        return replace(self, segments=tuple(zip((number for number, _ in self.segments), slices, strict=True)))

    def _segments_in(self, part: slice) -> Iterator[tuple[int, slice]]:
        for number, segment in self.segments:
            start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
            if start < stop:
                yield number, slice(start, stop)


def add_product_(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``into += left @ right`` for float32 ``target`` and factors of any dtype; on CUDA in one kernel."""
    if not target.numel():
        return
    if left.dtype == torch.float32:
        target.addmm_(left, right)
    elif left.device.type == "cuda":
        torch.addmm(target, left, right, out_dtype=torch.float32, out=target)
    else:
        target += torch.mm(left, right)
