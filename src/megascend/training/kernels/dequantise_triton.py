"""Dequantisation of weights in fp8 or 4 bits as one Triton kernel: codes are read once, and only the values are written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 2048


@triton.jit
def _dequantise_kernel(
    codes, scales, table, out, columns, blocks, row_bytes, SCALED: tl.constexpr, FOUR_BITS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    if FOUR_BITS:
        pair = tl.load(codes + row * row_bytes + column // 2, mask=inside, other=0).to(tl.int32)
        value = tl.load(table + tl.where(column % 2 == 0, pair >> 4, pair & 15), mask=inside, other=0.0)
    else:
        value = tl.load(codes + row * row_bytes + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row * blocks + column // SCALED, mask=inside, other=0.0)
    tl.store(out + row * columns + column, (value * scale).to(out.dtype.element_ty), mask=inside)


def dequantise(codes: Tensor, scales: Tensor, table: Tensor | None, out: Tensor) -> None:
    """Write the values of ``codes`` into ``out``, as ``lora.quantised_weights.QuantisedWeights`` defines them.

    Args:
        codes: [..., rows, bytes of a row], contiguous, on the GPU: float8_e4m3fn, or uint8 with two codes of 4 bits a byte, the
            first in its high half.
        scales: fp32 [..., rows, blocks], contiguous.
        table: fp32 [16], the values of 4-bit codes; None for fp8.
        out: [..., rows, columns], contiguous.
    """
    columns, blocks, row_bytes = out.shape[-1], scales.shape[-1], codes.shape[-1]
    values = row_bytes * (1 if table is None else 2)
    rows = out.numel() // columns
    block = min(triton.next_power_of_2(columns), MAX_COLUMNS)
    _dequantise_kernel[rows, triton.cdiv(columns, block)](  # type: ignore[reportIndexIssue]
        codes, scales, codes if table is None else table, out, columns, blocks, row_bytes,
        SCALED=values // blocks, FOUR_BITS=table is not None, COLUMNS=block, num_warps=4,
    )  # fmt: skip
