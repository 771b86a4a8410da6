"""The softmax of a chunk of logits as two Triton kernels, one program a row; softmax.py explains the mathematics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WARPS = 8


@triton.jit
def _statistics_kernel(
    logits, targets, maxima, totals, target_logits, weights, stride, columns, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute maximum and sum online (Milakov and Gimelshein 2018): the row is read once."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    tl.store(target_logits + row, tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32))
    maximum = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        shift = tl.exp(maximum - larger)
        shifted = tl.where(inside, x - larger, 0.0)
        exponentials = tl.where(inside, tl.exp(shifted), 0.0)
        if ENTROPY:
            # In the first block -inf times a total of 0 would be NaN.
            moved = tl.where(total > 0, shift * (weighted + (maximum - larger) * total), 0.0)
            weighted = moved + tl.sum(exponentials * shifted, axis=0)
        total = total * shift + tl.sum(exponentials, axis=0)
        maximum = larger
    tl.store(maxima + row, maximum)
    tl.store(totals + row, total)
    if ENTROPY:
        tl.store(weights + row, weighted)


@triton.jit
def _gradient_kernel(
    logits, targets, log_sums, scales, entropies, entropy_scales, stride, columns, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    log_sum = tl.load(log_sums + row)
    scale = tl.load(scales + row)
    if ENTROPY:
        entropy = tl.load(entropies + row)
        entropy_scale = tl.load(entropy_scales + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        log_p = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32) - log_sum
        factor = scale
        if ENTROPY:
            factor = scale - entropy_scale * (tl.where(inside, log_p, 0.0) + entropy)
        gradient = tl.exp(log_p) * factor - tl.where(column == target, scale, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


def shard_statistics(
    logits: Tensor, local_targets: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ``ShardStatistics`` of :mod:`megascend.training.kernels.softmax`."""
    count, columns = logits.shape
    maxima, totals, target_logits, weighted = torch.empty(4, count, dtype=torch.float32, device=logits.device).unbind(0)
    _statistics_kernel[(count,)](  # type: ignore[reportIndexIssue]
        logits, local_targets, maxima, totals, target_logits, weighted, logits.stride(0), columns,
        ENTROPY=entropy, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return maxima, totals, target_logits, weighted if entropy else None


def gradient_(
    logits: Tensor,
    local_targets: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    entropy: Tensor | None,
    entropy_scale: Tensor | None,
) -> None:
    """Replace ``logits`` by the gradient of :func:`megascend.training.kernels.softmax.gradient_`."""
    entropies = entropy_scales = scale  # pointers that the kernel does not follow without entropy
    if entropy is not None and entropy_scale is not None:
        entropies, entropy_scales = entropy, entropy_scale.contiguous()
    _gradient_kernel[(len(logits),)](  # type: ignore[reportIndexIssue]
        logits, local_targets, log_sum, scale.contiguous(), entropies, entropy_scales, logits.stride(0), logits.shape[1],
        ENTROPY=entropies is not scale, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
