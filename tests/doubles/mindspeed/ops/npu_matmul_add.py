"""The matrix product that adds a weight's gradient to Megatron's buffer (Apex's ``fused_weight_gradient_mlp_cuda``)."""

from __future__ import annotations

from torch import Tensor


def npu_matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """``grad += grad_output.T @ total_input``."""
    grad.add_(grad_output.t().matmul(total_input))


def npu_matmul_add_fp16(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """``grad += grad_output.T @ total_input``."""
    grad.add_(grad_output.t().matmul(total_input))
