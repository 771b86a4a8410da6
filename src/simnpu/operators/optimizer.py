"""Fused AdamW steps: ``npu_apply_adam_w`` and MindSpeed's ``npu_apply_fused_adamw_v2``.

Formula: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.types import Number

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import extension, on_host, operator, overload
from simnpu.operators.refusal import Refusal


def adamw(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, bias1: float, bias2: float, lr: float,
    weight_decay: float, beta1: float, beta2: float, eps: float, maximize: bool, largest: Tensor | None = None,
) -> None:  # fmt: skip
    """Run one step in place. ``bias1`` and ``bias2`` are 1 - beta^step; ``largest``: AMSGrad's running maximum."""
    grad = -grad.to(mean.dtype) if maximize else grad.to(mean.dtype)
    param.mul_(1 - lr * weight_decay)
    mean.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if largest is not None:
        square = largest.copy_(largest.maximum(square))
    denominator = (square / bias2).sqrt_().add_(eps)
    param.sub_((lr / bias1 * mean / denominator).to(param.dtype))


@operator
def npu_apply_adam_w(
    beta1_power: Number, beta2_power: Number, lr: Number, weight_decay: Number, beta1: Number, beta2: Number,
    epsilon: Number, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool | None, maximize: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Refuse the call: without ``out`` there is nothing to step."""
    Refusal("npu_apply_adam_w", "ApplyAdamW")("npu_apply_adam_w is not implemented for Tensor: pass out=(var, m, v)")


@overload("npu_apply_adam_w.out")
def npu_apply_adam_w_out(
    beta1_power: Number, beta2_power: Number, lr: Number, weight_decay: Number, beta1: Number, beta2: Number,
    epsilon: Number, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool | None, maximize: bool | None, *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run one AdamW step on ``out`` = (var, m, v), in place. ``beta1_power`` is beta1^step, ``beta2_power`` beta2^step."""
    if amsgrad:
        raise NotSimulatedError("npu_apply_adam_w with amsgrad is not simulated by simnpu")

    def step(var: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[()]:
        bias1, bias2 = 1 - beta1_power, 1 - beta2_power
        adamw(var, grad, m, v, bias1, bias2, lr, weight_decay, beta1, beta2, epsilon, bool(maximize))
        return ()

    on_host(step)(out[0], grad, *out[1:])
    return tuple(out)  # type: ignore[return-value]


@extension
def npu_apply_fused_adamw_v2(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    state_step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """Run one AdamW step on ``param`` and its moments, in place; ``state_step`` counts from 1 (built by MindSpeed)."""
    if amsgrad:
        raise NotSimulatedError("npu_apply_fused_adamw_v2 with amsgrad is not simulated by simnpu")
    step_number = int(state_step) if isinstance(state_step, Tensor) else state_step

    def step(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[()]:
        bias1, bias2 = 1 - beta1**step_number, 1 - beta2**step_number
        adamw(param, grad, m, v, bias1, bias2, lr, weight_decay, beta1, beta2, eps, maximize)
        return ()

    on_host(step)(param, grad, exp_avg, exp_avg_sq)
