"""SwiGLU, silu(gate) * up, and its gradient, in two Triton kernels.

Megatron has torch.compile fuse it: that imports inductor and compiles once for each of two shapes, seconds before the first step.
These kernels know no shapes, are compiled in a fraction of that, and kept by Triton's cache for the next start.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascend.changes import patch

BLOCK = 1024


@triton.jit
def _forward_kernel(y, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(y + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, y, dy, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    upstream = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(y + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = upstream * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up
    of_up = upstream * gate * sigmoid
    tl.store(dy + row * 2 * width + column, of_gate.to(dy.dtype.element_ty), mask=inside)
    tl.store(dy + row * 2 * width + width + column, of_up.to(dy.dtype.element_ty), mask=inside)


def gated_silu(y: Tensor) -> Tensor:
    """silu(y[:, :width]) * y[:, width:] of ``y`` [rows, 2 * width], in fp32 inside; [rows, width] in the dtype of ``y``."""
    y = y.contiguous()
    rows, width = y.shape[0], y.shape[1] // 2
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    if rows:
        _forward_kernel[(rows, triton.cdiv(width, BLOCK))](y, out, width, BLOCK=BLOCK, num_warps=4)  # type: ignore[reportIndexIssue]
    return out


def gated_silu_back(grad: Tensor, y: Tensor) -> Tensor:
    """Gradient of :func:`gated_silu` with respect to ``y``, given that of its result; in the dtype of ``y``."""
    grad, y = grad.contiguous(), y.contiguous()
    rows, width = y.shape[0], y.shape[1] // 2
    dy = torch.empty(rows, 2 * width, dtype=y.dtype, device=y.device)
    if rows:
        _backward_kernel[(rows, triton.cdiv(width, BLOCK))](grad, y, dy, width, BLOCK=BLOCK, num_warps=4)  # type: ignore[reportIndexIssue]
    return dy


def install() -> None:
    """Have Megatron's fused SwiGLU without bias computed here; that of experts stays torch.compile's. Idempotent."""
    from megatron.core.fusions import fused_bias_swiglu as fused

    original: Any = fused.SwiGLUFunction
    if issubclass(original, _Marked):
        return

    class SwiGLUFunction(original, _Marked):
        @staticmethod
        def forward(ctx: Any, input: Tensor, fp8_input_store: bool, cpu_offload_input: bool) -> Tensor:
            kept = input.to(torch.float8_e4m3fn) if fp8_input_store else input
            if cpu_offload_input:
                kept.activation_offloading = True  # type: ignore[attr-defined]
            ctx.save_for_backward(kept)
            ctx.dtype = input.dtype
            return gated_silu(input)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (kept,) = ctx.saved_tensors
            return gated_silu_back(grads[0], kept.to(ctx.dtype)), None, None

    patch(fused, "SwiGLUFunction", SwiGLUFunction, "SwiGLU in two Triton kernels")


class _Marked:
    """What :func:`install` has put in place."""
