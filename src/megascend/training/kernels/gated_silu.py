"""SwiGLU, silu(gate) * up, and its gradient, in two Triton kernels.

Megatron uses torch.compile for it, which imports inductor and compiles once for each of two shapes: seconds before the first
step. These kernels are independent of shapes, compile in a fraction of that time, and stay in Triton's cache for the next start.
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
    # int64: offsets may exceed 2**31.
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
    # silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x))).
    sigmoid = tl.sigmoid(gate)
    gate_grad = upstream * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up
    up_grad = upstream * gate * sigmoid
    tl.store(dy + row * 2 * width + column, gate_grad.to(dy.dtype.element_ty), mask=inside)
    tl.store(dy + row * 2 * width + width + column, up_grad.to(dy.dtype.element_ty), mask=inside)


def gated_silu(y: Tensor) -> Tensor:
    """Compute silu(y[:, :width]) * y[:, width:] in fp32: ``y`` [rows, 2 * width] to [rows, width] in the dtype of ``y``."""
    y = y.contiguous()
    rows, width = y.shape[0], y.shape[1] // 2
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    if rows:
        _forward_kernel[(rows, triton.cdiv(width, BLOCK))](y, out, width, BLOCK=BLOCK, num_warps=4)  # type: ignore[reportIndexIssue]
    return out


def gated_silu_back(grad: Tensor, y: Tensor) -> Tensor:
    """Compute the gradient with respect to ``y`` from ``grad``, the gradient of :func:`gated_silu`'s result."""
    grad, y = grad.contiguous(), y.contiguous()
    rows, width = y.shape[0], y.shape[1] // 2
    dy = torch.empty(rows, 2 * width, dtype=y.dtype, device=y.device)
    if rows:
        _backward_kernel[(rows, triton.cdiv(width, BLOCK))](grad, y, dy, width, BLOCK=BLOCK, num_warps=4)  # type: ignore[reportIndexIssue]
    return dy


def install() -> None:
    """Replace Megatron's fused SwiGLU without bias; experts' SwiGLU stays with torch.compile. Idempotent."""
    from megatron.core.fusions import fused_bias_swiglu as fused

    original: Any = fused.SwiGLUFunction
    # A second backend in this process finds the replacement.
    if issubclass(original, _ReplacementMarker):
        return

    class SwiGLUFunction(original, _ReplacementMarker):
        @staticmethod
        def forward(ctx: Any, input: Tensor, fp8_input_store: bool, cpu_offload_input: bool) -> Tensor:
            # As upstream: it may store the input in fp8, or offload it to the CPU.
            saved = input.to(torch.float8_e4m3fn) if fp8_input_store else input
            if cpu_offload_input:
                saved.activation_offloading = True  # type: ignore[attr-defined]
            ctx.save_for_backward(saved)
            ctx.dtype = input.dtype
            return gated_silu(input)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (saved,) = ctx.saved_tensors
            return gated_silu_back(grads[0], saved.to(ctx.dtype)), None, None

    patch(fused, "SwiGLUFunction", SwiGLUFunction, "SwiGLU in two Triton kernels")


class _ReplacementMarker:
    """Marker base class of the replacement that :func:`install` creates."""
