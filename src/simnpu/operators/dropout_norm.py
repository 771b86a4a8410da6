"""``npu_dropout_add_layer_norm``: dropout, residual and normalisation in one operator, which MindSpeed builds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from simnpu.operators.dispatch import differentiable, operator, random_generator
from simnpu.operators.refusal import Refusal


@operator
def npu_dropout_add_layer_norm(
    x0: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """norm(dropout(x0 * rowscale * layerscale) + residual) for x0 [batch, sequence, hidden], summed in float32.

    Args:
        rowscale: [batch, sequence]. layerscale: [hidden].
        prenorm: return what is normalised, too, in the type of the residual (without one in that of ``x0``, or float32).

    Returns:
        the result in the type of ``x0``; what was normalised, or None; the mask of kept elements, or None.
    """
    refuse = Refusal("npu_dropout_add_layer_norm", "npu_dropout_add_layer_norm")
    if x0.dim() != 3 or tuple(weight.shape) != (x0.shape[-1],):
        refuse(
            f"x0 must be [batch, sequence, hidden] and weight [hidden], but got {list(x0.shape)}, {list(weight.shape)}"
        )
    if not 0.0 <= dropout_p < 1.0:
        refuse(f"dropout probability has to be in [0, 1), but got {dropout_p}")
    kept = torch.ones(x0.shape, dtype=torch.bool)
    if dropout_p:
        kept = torch.rand(x0.shape, generator=random_generator()) >= dropout_p
    wide_residual = torch.float32 if residual_in_fp32 else x0.dtype
    residual_type = residual.dtype if residual is not None else wide_residual

    def normalise(x0: Tensor, weight: Tensor, *optional: Tensor | None) -> tuple[Tensor, Tensor]:
        residual, bias, rowscale, layerscale = (None if tensor is None else tensor.float() for tensor in optional)
        total = x0.float()
        if rowscale is not None:
            total = total * rowscale.unsqueeze(-1)
        if layerscale is not None:
            total = total * layerscale
        total = total * kept / (1 - dropout_p)
        if residual is not None:
            total = total + residual
        if is_rms_norm:
            found = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight.float()
        else:
            found = functional.layer_norm(total, weight.shape, weight.float(), bias, epsilon)
        return found.to(x0.dtype), total.to(residual_type)

    result, total = differentiable(normalise)(x0, weight, residual, bias, rowscale, layerscale)
    return result, total if prenorm else None, kept.to(x0.device) if return_dropout_mask else None
