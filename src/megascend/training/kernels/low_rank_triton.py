"""Products of segments of rows with one low-rank matrix each, as three Triton kernels.

One of the three sizes of such a product, the rank, is small, so the run time depends on the memory traffic of the rows: each is
read and written once. The ends of segments are only known on the device, their number is arbitrary, and a row is never
multiplied with the matrix of another segment, so that NaN or inf does not spread.

Matrices are [g, k, m] or [outer, inner, k, m]; segment ``s`` uses matrix ``s`` or ``(s // inner, s % inner)``. They may have any
strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascend.training.kernels.low_rank import MAX_RANK

PROGRAMS = 264
"""Minimum number of programs (two for each multiprocessor of an H100): with fewer, blocks are made narrower."""


@triton.jit
def _segment_of(ends, row, segments, SEGMENTS: tl.constexpr):
    """Return the first segment that ends after ``row``."""
    # Entries beyond the last segment never count.
    index = tl.arange(0, SEGMENTS)
    end = tl.load(ends + index, mask=index < segments, other=2147483647)
    return tl.sum((end <= row).to(tl.int32))


@triton.jit
def _narrow_kernel(
    rows, weights, ends, out, n, segments, inner, row_stride, outer_stride, inner_stride, k_stride, m_stride, k, m,
    SEGMENTS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Multiply [ROWS, k] to [ROWS, m], with small m."""
    begin = tl.program_id(0) * ROWS
    stop = tl.minimum(begin + ROWS, n)
    row, column, depth = begin + tl.arange(0, ROWS), tl.arange(0, M), tl.arange(0, K)
    row_ptrs = rows + row.to(tl.int64)[:, None] * row_stride
    # A block of rows may span several segments: one masked product for each.
    segment = _segment_of(ends, begin, segments, SEGMENTS)
    while (begin < stop) & (segment < segments):
        end = tl.minimum(tl.load(ends + segment), stop)
        if end > begin:
            in_segment = (row >= begin) & (row < end)
            # int64: offsets into the stack of all adapters may exceed 2**31.
            matrix_offset = (segment // inner).to(tl.int64) * outer_stride + (segment % inner).to(
                tl.int64
            ) * inner_stride
            total = tl.zeros([ROWS, M], tl.float32)
            for start in range(0, k, K):
                inner_index = start + depth
                x = tl.load(
                    row_ptrs + inner_index[None, :], mask=in_segment[:, None] & (inner_index < k)[None, :], other=0.0
                )
                weight_ptrs = weights + matrix_offset + inner_index[:, None] * k_stride + column[None, :] * m_stride
                w = tl.load(weight_ptrs, mask=(inner_index < k)[:, None] & (column < m)[None, :], other=0.0)
                total = tl.dot(x, w, total)
            out_ptrs = out + row.to(tl.int64)[:, None] * m + column[None, :]
            tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=in_segment[:, None] & (column < m)[None, :])
        begin = end
        segment += 1


@triton.jit
def _wide_kernel(
    rows, weights, ends, base, out, n, segments, inner, row_stride, base_stride, outer_stride, inner_stride, k_stride,
    m_stride, k, m, WITH_BASE: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Multiply [ROWS, k] to M columns, [ROWS, M], with small k; add ``base``."""
    begin = tl.program_id(0) * ROWS
    stop = tl.minimum(begin + ROWS, n)
    row, depth = begin + tl.arange(0, ROWS), tl.arange(0, K)
    column = tl.program_id(1) * M + tl.arange(0, M)
    inside = (column < m)[None, :]
    segment = _segment_of(ends, begin, segments, SEGMENTS)
    while (begin < stop) & (segment < segments):
        end = tl.minimum(tl.load(ends + segment), stop)
        if end > begin:
            in_segment = ((row >= begin) & (row < end))[:, None]
            matrix_offset = (segment // inner).to(tl.int64) * outer_stride + (segment % inner).to(
                tl.int64
            ) * inner_stride
            row_ptrs = rows + row.to(tl.int64)[:, None] * row_stride + depth[None, :]
            x = tl.load(row_ptrs, mask=in_segment & (depth < k)[None, :], other=0.0)
            weight_ptrs = weights + matrix_offset + depth[:, None] * k_stride + column[None, :] * m_stride
            w = tl.load(weight_ptrs, mask=(depth < k)[:, None] & inside, other=0.0)
            total = tl.dot(x, w)
            if WITH_BASE:
                base_ptrs = base + row.to(tl.int64)[:, None] * base_stride + column[None, :]
                total += tl.load(base_ptrs, mask=in_segment & inside, other=0.0).to(tl.float32)
            out_ptrs = out + row.to(tl.int64)[:, None] * m + column[None, :]
            tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=in_segment & inside)
        begin = end
        segment += 1


@triton.jit
def _gradient_kernel(
    small, large, ends, target, inner, small_stride, large_stride, outer_stride, inner_stride, p_stride, q_stride, p, q,
    ROWS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Compute ``into[segment] += small.T @ large`` over the rows of one segment, for Q of the q columns."""
    segment = tl.program_id(0)
    begin = tl.load(ends + segment - 1, mask=segment > 0, other=0)
    end = tl.load(ends + segment)
    if end > begin:
        across, column = tl.arange(0, P), tl.program_id(1) * Q + tl.arange(0, Q)
        total = tl.zeros([P, Q], tl.float32)
        for start in range(begin, end, ROWS):
            row = start + tl.arange(0, ROWS)
            in_segment = (row < end)[:, None]
            small_ptrs = small + row.to(tl.int64)[:, None] * small_stride + across[None, :]
            small_block = tl.load(small_ptrs, mask=in_segment & (across < p)[None, :], other=0.0)
            large_ptrs = large + row.to(tl.int64)[:, None] * large_stride + column[None, :]
            large_block = tl.load(large_ptrs, mask=in_segment & (column < q)[None, :], other=0.0)
            total = tl.dot(tl.trans(small_block), large_block, total)
        matrix_offset = (segment // inner).to(tl.int64) * outer_stride + (segment % inner).to(tl.int64) * inner_stride
        target_ptrs = target + matrix_offset + across[:, None] * p_stride + column[None, :] * q_stride
        # No atomics: no other program has this tile of this segment.
        inside = (across < p)[:, None] & (column < q)[None, :]
        tl.store(target_ptrs, tl.load(target_ptrs, mask=inside, other=0.0) + total, mask=inside)


def product(rows: Tensor, weights: Tensor, ends: Tensor, base: Tensor | None = None) -> Tensor:
    """Return ``rows[segment s] @ weights[s]`` plus ``base``, added in fp32 and rounded once: [n, k] to [n, m].

    ``weights``: see the module; k or m is at most :data:`MAX_RANK`. ``ends``: int32 [segments]; rows after the last segment are
    not written. bf16 or fp16.
    """
    (n, k), m = rows.shape, weights.shape[-1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(n, m, dtype=rows.dtype, device=rows.device)
    segments, inner, *strides = _strides_of(weights)
    block = triton.next_power_of_2(len(ends))
    if m <= MAX_RANK and (k > MAX_RANK or (m <= k and base is None)):
        small = _small(m)
        _narrow_kernel[(triton.cdiv(n, 64),)](  # type: ignore[reportIndexIssue]
            rows, weights, ends, out, n, segments, inner, rows.stride(0), *strides, k, m,
            SEGMENTS=block, ROWS=64, K=64 if small > 64 else 128, M=small, num_warps=4, num_stages=3,
        )  # fmt: skip
        return out if base is None else out.add_(base)
    assert k <= MAX_RANK, f"neither of {k} and {m} is small"
    base = None if base is None else base if base.stride(1) == 1 else base.contiguous()
    small, wide = _small(k), 128 if k <= 128 else 64
    grid = (triton.cdiv(n, 64), triton.cdiv(m, wide))
    _wide_kernel[grid](  # type: ignore[reportIndexIssue]
        rows, weights, ends, out if base is None else base, out, n, segments, inner, rows.stride(0),
        0 if base is None else base.stride(0), *strides, k, m,
        WITH_BASE=base is not None, SEGMENTS=block, ROWS=64, K=small, M=wide, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def accumulate(target: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Add ``left[segment s].T @ right[segment s]``, [n, k] and [n, m], to float32 ``into[s]``; k or m is at most MAX_RANK."""
    if target.shape[-2] > target.shape[-1]:
        accumulate(target.mT, right, left, ends)
        return
    p, q = target.shape[-2:]
    # The kernel loads rows with unit stride.
    small, large = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (left, right))
    segments, inner, *strides = _strides_of(target)
    # At most 8192 fp32 sums per program: 64 registers for each thread of 4 warps.
    wide = next(
        (wide for wide in (128, 64) if segments * triton.cdiv(q, wide) >= PROGRAMS and wide * _small(p) <= 8192), 32
    )
    _gradient_kernel[(segments, triton.cdiv(q, wide))](  # type: ignore[reportIndexIssue]
        small, large, ends, target, inner, small.stride(0), large.stride(0), *strides, p, q,
        ROWS=64, P=_small(p), Q=wide, num_warps=4, num_stages=3,
    )  # fmt: skip


def _small(size: int) -> int:
    """Return the block size for a small dimension; ``tl.dot`` needs at least 16."""
    return max(16, triton.next_power_of_2(size))


def _strides_of(matrices: Tensor) -> tuple[int, int, int, int, int, int]:
    """Return (segments, inner, strides of outer and inner, strides of a matrix's rows and columns)."""
    if matrices.dim() == 3:
        return len(matrices), 1, matrices.stride(0), 0, matrices.stride(1), matrices.stride(2)
    outer, inner = matrices.shape[:2]
    outer_stride, inner_stride, row_stride, column_stride = matrices.stride()
    return outer * inner, inner, outer_stride, inner_stride, row_stride, column_stride
