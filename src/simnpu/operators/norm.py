"""Normalisation: ``npu_rms_norm``, ``npu_add_rms_norm``, ``npu_gemma_rms_norm`` and ``npu_dropout_add_layer_norm``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from simnpu.operators.dispatch import differentiable, extension, on_host, operator, random_generator
from simnpu.operators.refusal import Refusal

ACCEPTED = {
    torch.float16: (torch.float16, torch.float32),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float32: (torch.float32,),
}
"""Types of gamma by the type of ``x``."""
KERNELS = {
    "npu_rms_norm": "aclnnRmsNorm",
    "npu_add_rms_norm": "aclnnAddRmsNorm",
    "npu_gemma_rms_norm": "aclnnGemmaRmsNorm",
}


def check_gamma(name: str, x: Tensor, gamma: Tensor) -> None:
    """Types, and gamma's shape: the last dimensions of ``x``."""
    refuse = Refusal(name, KERNELS[name])
    if gamma.dtype not in ACCEPTED.get(x.dtype, ()):
        pairs = ", ".join(f"{a}/{b}".replace("torch.", "") for a, allowed in ACCEPTED.items() for b in allowed)
        refuse.kernel(f"not support input dtype: x {x.dtype}, gamma {gamma.dtype}; it takes {pairs}")
    if name == "npu_add_rms_norm" and gamma.dtype != x.dtype:
        refuse.kernel(f"gamma must have the type of x1, {x.dtype}, but got {gamma.dtype}")
    if tuple(x.shape[-gamma.dim() :]) != tuple(gamma.shape):
        refuse.kernel(f"gamma shape {list(gamma.shape)} must equal the last dimensions of x {list(x.shape)}")


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + epsilon) * gamma in the type of ``x``, and the reciprocal root in float32."""
    axes = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd.detach()


@operator
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the normalised tensor, and rstd with the normalised dimensions kept as 1."""
    check_gamma("npu_rms_norm", input, gamma)
    return differentiable(rms_norm)(input, gamma, epsilon)


@operator
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm(x1 + x2), rstd, and the sum. Not differentiable, as in torch_npu."""
    check_gamma("npu_add_rms_norm", x1, gamma)
    if x1.shape != x2.shape or x1.dtype != x2.dtype:
        Refusal("npu_add_rms_norm", "aclnnAddRmsNorm").kernel(
            f"x1 and x2 must have one shape and type, but got {list(x1.shape)} {x1.dtype}, {list(x2.shape)} {x2.dtype}"
        )

    def add_and_normalise(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x1.float() + x2.float()
        y, rstd = rms_norm(total, gamma, epsilon)
        return y.to(x1.dtype), rstd, total.to(x1.dtype)

    return on_host(add_and_normalise)(x1, x2, gamma)


@operator
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Compute :func:`npu_rms_norm` with the weight 1 + gamma, as Gemma has it; for inference."""
    check_gamma("npu_gemma_rms_norm", input, gamma)
    return on_host(lambda x, gamma: rms_norm(x, gamma.float() + 1, epsilon))(input, gamma)


@extension
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
    keep_mask = torch.ones(x0.shape, dtype=torch.bool)
    if dropout_p:
        keep_mask = torch.rand(x0.shape, generator=random_generator()) >= dropout_p
    wide_residual = torch.float32 if residual_in_fp32 else x0.dtype
    residual_type = residual.dtype if residual is not None else wide_residual

    def normalise(x0: Tensor, weight: Tensor, *optional: Tensor | None) -> tuple[Tensor, Tensor]:
        residual, bias, rowscale, layerscale = (None if tensor is None else tensor.float() for tensor in optional)
        total = x0.float()
        if rowscale is not None:
            total = total * rowscale.unsqueeze(-1)
        if layerscale is not None:
            total = total * layerscale
        total = total * keep_mask / (1 - dropout_p)
        if residual is not None:
            total = total + residual
        if is_rms_norm:
            normalised = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight.float()
        else:
            normalised = functional.layer_norm(total, weight.shape, weight.float(), bias, epsilon)
        return normalised.to(x0.dtype), total.to(residual_type)

    result, total = differentiable(normalise)(x0, weight, residual, bias, rowscale, layerscale)
    return result, total if prenorm else None, keep_mask.to(x0.device) if return_dropout_mask else None
