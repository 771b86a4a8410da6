"""Grouped matrix products, one matrix for each segment of rows: they apply many adapters to one batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from megascend.training.kernels.host_copy import to_device
from megascend.training.kernels.low_rank import MAX_RANK
from megascend.training.kernels.npu import grouped_product

TORCH_GROUPS = 1023
"""Most segments that ``torch._grouped_mm`` takes on a GPU (its check is ``< 1024``); eight adapters of 128 experts are more."""


@dataclass(frozen=True)
class Segments:
    """Consecutive segments of a matrix's rows, one for each matrix of a grouped product; a segment may be empty.

    Attributes:
        ends: int32 [segments] on the device, the end of each segment; the last is the number of rows.
        counts: rows of each segment if the CPU knows them; else they are read from the device when needed.
    """

    ends: Tensor
    counts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Segments:
        """Build segments of known lengths."""
        return cls(to_device(torch.tensor(counts).cumsum(0).int(), device), tuple(counts))

    def sizes(self) -> list[int]:
        """Return the rows of each segment. Waits for the device unless the CPU knows them."""
        if self.counts is not None:
            return list(self.counts)
        return self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()


@cache
def kernel_of(device: torch.device) -> Literal["torch", "npu"] | None:
    """Return the library with grouped products on a device: torch on compute capability 9.0, torch_npu on NPUs."""
    if device.type == "npu":
        return "npu"
    # Not 10.0: the weight gradient of a segment without rows is not zero there (pytorch/pytorch#172439).
    return "torch" if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) else None


def kernel_for(rows: Tensor, weights: Tensor) -> Literal["torch", "npu", "triton"] | None:
    """Return the kernel for these operands, or None. Needs 16 bits and, except Triton's for low rank, sizes that are
    multiples of 8."""
    k, m = weights.shape[-2:]
    # The kernels take no empty operands.
    if rows.dtype not in (torch.bfloat16, torch.float16) or not len(rows):
        return None
    kernel = kernel_of(rows.device)
    if kernel == "torch" and rows.device.type == "cuda" and min(k, m) <= MAX_RANK:
        return "triton"
    if k % 8 or m % 8 or (kernel == "torch" and rows.dtype != torch.bfloat16):
        return None
    return kernel


def product(rows: Tensor, weights: Tensor, segments: Segments | None, base: Tensor | None = None) -> Tensor:
    """Compute ``rows[segment g] @ weights[g]``, plus ``base``: [n, k] and [segments, k, m] to [n, m].

    Args:
        weights: also [outer, inner, k, m], of segment ``outer * len(inner) + inner``; without ``segments`` [1, k, m].
    """
    if segments is None:
        return rows @ weights[0] if base is None else torch.addmm(base, rows, weights[0])
    kernel = kernel_for(rows, weights)
    if kernel == "triton":
        from megascend.training.kernels import low_rank_triton

        return low_rank_triton.product(rows, weights, segments.ends, base)
    weights = weights.flatten(0, -3)
    if kernel == "torch":
        out = _product_by_torch(rows, weights, segments.ends)
    elif kernel == "npu":
        out = grouped_product(rows, weights.contiguous(), segments.ends, by_rows=True)
    else:
        # A loop on devices without a grouped kernel.
        out = torch.cat([part @ matrix for part, matrix in zip(rows.split(segments.sizes()), weights, strict=True)])
    return out if base is None else out.add_(base)


def accumulate(target: Tensor, left: Tensor, right: Tensor, segments: Segments | None) -> None:
    """Compute ``into[g] += left[segment g].T @ right[segment g]``: [n, k] and [n, m] into float32 [segments, k, m].

    Args:
        into: also [outer, inner, k, m], as the weights of :func:`product`.
    """
    kernel = None if segments is None else kernel_for(left, target)
    if segments is not None and kernel == "triton":
        from megascend.training.kernels import low_rank_triton

        low_rank_triton.accumulate(target, left, right, segments.ends)
    # StackedAdapters stores the gradients of A transposed.
    elif target.stride(-1) != 1:
        accumulate(target.mT, right, left, segments)
    elif segments is None:
        target.flatten(0, -3)[0].add_(left.T @ right)
    elif target.dim() == 4:  # by (outer, inner), whose strides may not allow a flat view
        sums = torch.zeros_like(target, memory_format=torch.contiguous_format).flatten(0, 1)
        accumulate(sums, left, right, segments)
        target.add_(sums.view(target.shape))
    elif kernel == "torch":
        for start, end in _parts(len(target)):
            products = torch._grouped_mm(left.T, right, offs=segments.ends[max(0, start - 1) : end])
            # In later calls the first group is the rows before ``start``.
            target[start:end].add_(products[1:] if start else products)
    elif kernel == "npu":
        target.add_(grouped_product(left.T, right, segments.ends, by_rows=False))
    else:
        sizes = segments.sizes()
        for total, left_rows, right_rows in zip(target, left.split(sizes), right.split(sizes), strict=True):
            if len(left_rows):
                total.add_(left_rows.T @ right_rows)


def _parts(segments: int) -> list[tuple[int, int]]:
    """Return (start, end) segments of each call. Only the device knows where segments begin, so all calls start at row 0."""
    starts = [0, *range(TORCH_GROUPS, segments, TORCH_GROUPS - 1)]
    return list(zip(starts, [*starts[1:], segments], strict=True))


def _product_by_torch(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute :func:`product` of any number of segments, without a wait for the device."""
    (_, first), *rest = _parts(len(weights))
    out = torch._grouped_mm(rows, weights[:first], offs=ends[:first])
    for start, end in rest:
        products = torch._grouped_mm(rows, weights[start - 1 : end], offs=ends[start - 1 : end])
        before = torch.arange(len(rows), device=rows.device) < ends[start - 1]
        out = torch.where(before[:, None], out, products)
    return out


class SegmentedLinear(torch.autograd.Function):
    """``base + rows[segment g] @ weights[g]``, whose weight gradients are added to a float32 buffer, if any.

    The weights are not autograd inputs: autograd would allocate their gradient for every layer and micro batch and need another
    kernel to add it to the buffer.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, grads: Tensor | None, segments: Segments | None, base: Tensor | None
    ) -> Tensor:
        """Compute :func:`product`.

        Args:
            rows: [n, k].
            grads: buffer that the gradient of ``weights`` is added to; None: the weights are frozen.
            base: [n, m], added to the result; or None.
        """
        ctx.save_for_backward(None if grads is None else rows, weights)
        ctx.grads, ctx.segments = grads, segments
        return product(rows, weights, segments, base)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = outputs
        rows, weights = ctx.saved_tensors
        contiguous = grad.contiguous()
        if ctx.grads is not None:
            accumulate(ctx.grads, rows, contiguous, ctx.segments)
        return (
            product(contiguous, weights.mT, ctx.segments),
            None,
            None,
            None,
            grad if ctx.needs_input_grad[4] else None,
        )
