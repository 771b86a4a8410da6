"""Sum of selected rows for each token, as one Triton kernel: each row is read once, and only sums are written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048


@triton.jit
def _gather_sum_kernel(values, row_index, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # In fp32: in bf16 each of the k additions would round.
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(K):
        row = tl.load(row_index + token * K + index).to(tl.int64)
        total += tl.load(values + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def gather_sum(values: Tensor, row_index: Tensor) -> Tensor:
    """Compute ``token_rows.gather_sum``; ``values`` and ``row_index`` are contiguous and on one GPU."""
    tokens, k = row_index.shape
    width = values.shape[1]
    out = torch.empty(tokens, width, dtype=values.dtype, device=values.device)
    if tokens:
        block = min(triton.next_power_of_2(width), MAX_BLOCK)
        grid = (tokens, triton.cdiv(width, block))
        _gather_sum_kernel[grid](values, row_index, out, width, K=k, BLOCK=block, num_warps=4)  # type: ignore[reportIndexIssue]
    return out
