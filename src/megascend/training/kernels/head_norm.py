"""RMSNorm over the width of one attention head, as models with QK-norm (Qwen3) need it, in two Triton kernels.

Transformer Engine's kernels are designed for norms as wide as the hidden state. For 128 columns and half a million rows they
spend most of their time in the second pass over the weight's gradient: 18 of the 29 ms of both norms in a step of
Qwen3-1.7B on an H200. These kernels also read keys in place from the fused projection's output, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascend.changes import patch
from megascend.training.kernels.head_sizes import width_fits

ROWS = 16
PROGRAMS_PER_PROCESSOR = 8
"""Backward programs on a multiprocessor. Each writes one row of partial sums: more would lengthen the second pass over them."""


@triton.jit
def _forward_kernel(
    x, weight, out, rstd, count, heads, token_stride, head_stride, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < count)[:, None]
    offset = (row // heads) * token_stride + (row % heads) * head_stride
    values = tl.load(x + offset[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    gain = tl.load(weight + column).to(tl.float32)[None, :]
    result = (values * scale[:, None] * gain).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * WIDTH + column[None, :], result, mask=inside)
    tl.store(rstd + row, scale, mask=row < count)


@triton.jit
def _backward_kernel(
    x, weight, grad, rstd, dx, partial, count, heads, token_stride, head_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Process a share of the rows; write one row of ``partial`` sums of the weight's gradient for each program."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    gain = tl.load(weight + column).to(tl.float32)[None, :]
    total = tl.zeros([WIDTH], tl.float32)
    blocks = tl.cdiv(count, ROWS)
    for block in range(program, blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < count)[:, None]
        offset = (row // heads) * token_stride + (row % heads) * head_stride
        scale = tl.load(rstd + row, mask=row < count, other=0.0)[:, None]
        normed = tl.load(x + offset[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(grad + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(upstream * normed, 0)
        # With n the normalised row: dx = rstd (g w - n mean(g w n)).
        scaled = upstream * gain
        mean = (tl.sum(scaled * normed, 1) / WIDTH)[:, None]
        result = (scale * (scaled - normed * mean)).to(dx.dtype.element_ty)
        tl.store(dx + row[:, None] * WIDTH + column[None, :], result, mask=inside)
    tl.store(partial + program * WIDTH + column, total)


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Keys are a slice of the fused projection's output, which needs no copy; other layouts are rare.
        x = x if _tokens_are_evenly_spaced(x) else x.contiguous()
        heads, width = x.shape[-2:]
        count = x.numel() // width
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(count, dtype=torch.float32, device=x.device)
        strides = x.stride(-3), x.stride(-2)
        _forward_kernel[(triton.cdiv(count, ROWS),)](  # type: ignore[reportIndexIssue]
            x, weight, out, rstd, count, heads, *strides, eps, WIDTH=width, ROWS=ROWS, num_warps=4
        )
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, weight, rstd = ctx.saved_tensors
        heads, width = x.shape[-2:]
        programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(x.device).multi_processor_count
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _backward_kernel[(programs,)](  # type: ignore[reportIndexIssue]
            x, weight, grads[0].contiguous(), rstd, dx, partial, len(rstd), heads, x.stride(-3), x.stride(-2),
            WIDTH=width, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
        # Partial sums and a second pass, not atomics: the order of additions is fixed.
        return dx, partial.sum(0).to(weight.dtype), None


def _tokens_are_evenly_spaced(x: Tensor) -> bool:
    """Check whether [..., heads, width] can be addressed with one stride over all tokens and one over heads."""
    if x.stride(-1) != 1 or x.dim() < 3:
        return False
    dims = list(zip(x.shape[:-2], x.stride()[:-2], strict=True))
    return all(stride == inner * size for (_, stride), (size, inner) in pairwise(dims))


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to ``x`` [..., tokens, heads, width] over its last dimension, in fp32; return the same shape and dtype."""
    return _HeadNorm.apply(x, weight, eps)


def install(chunks: Sequence[torch.nn.Module]) -> int:
    """Use these kernels in every supported QK-norm of ``chunks``; return their number. Parameters are unchanged."""
    count = 0
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if not name.endswith(("q_layernorm", "k_layernorm")) or not _fits(module):
                continue

            def forward(x: Tensor, module: Any = module) -> Tensor:
                return head_norm(x, module.weight, module.eps)

            patch(module, "forward", forward, "QK-norm in two Triton kernels")
            count += 1
    return count


def _fits(module: torch.nn.Module) -> bool:
    """Check for a plain RMSNorm over a width that the kernels support, on a GPU."""
    weight = getattr(module, "weight", None)
    if (
        type(module).__name__ != "RMSNorm"
        or weight is None
        or weight.device.type != "cuda"
        or not hasattr(module, "eps")
    ):
        return False
    return width_fits(weight.numel()) and not getattr(module, "zero_centered_gamma", False)
