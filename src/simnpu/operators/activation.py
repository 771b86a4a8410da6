"""Activations (``npu_swiglu``, ``npu_geglu``, ``npu_gelu``, ``fast_gelu``, ``npu_silu``, ``npu_scaled_masked_softmax``), and
casts and formats, which have no meaning of their own on the simulated device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.types import Number

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import differentiable, operator, overload
from simnpu.operators.quantised_types import dtype_of
from simnpu.operators.refusal import Refusal


def check_halves(name: str, x: Tensor, dim: int) -> None:
    """Check that the dimension to split exists and is even."""
    refuse = Refusal(name, "aclnnSwiGlu" if name == "npu_swiglu" else "aclnnGeGluV3")
    if not -x.dim() <= dim < x.dim():
        refuse(
            f" Expected {name} dim value {dim} to be in range [{-x.dim()}, {x.dim() - 1}] but check failed."
        )  # the space is torch_npu's
    if x.shape[dim] % 2:
        refuse.kernel(f"the size of dim {dim} must be even, but got {x.shape[dim]}")


@operator
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half."""
    check_halves("npu_swiglu", input, dim)

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim)
        return (functional.silu(gate) * up).to(x.dtype)

    return differentiable(swiglu)(input)


@operator
def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """gelu(right half) * left half (``activate_left``: the other way round), and the gelu. ``approximate`` 1: tanh."""
    check_halves("npu_geglu", input, dim)

    def geglu(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.float().chunk(2, dim)
        activated, other = (left, right) if activate_left else (right, left)
        gelu = functional.gelu(activated, approximate="tanh" if approximate else "none")
        return (gelu * other).to(x.dtype), gelu.detach().to(x.dtype)

    return differentiable(geglu)(input)


@operator
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU, exact or by tanh."""
    return differentiable(lambda x: functional.gelu(x.float(), approximate=approximate).to(x.dtype))(input)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


@operator
def fast_gelu(input: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the formula of the FastGelu kernel."""
    return differentiable(quick_gelu)(input)


@operator
def npu_fast_gelu(input: Tensor) -> Tensor:
    """Compute :func:`fast_gelu` under its newer name."""
    return differentiable(quick_gelu)(input)


@operator
def npu_silu(input: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return differentiable(lambda x: functional.silu(x.float()).to(x.dtype))(input)


@operator
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: Number = 1, fixed_triu_mask: bool = False) -> Tensor:
    """softmax(scale * x) over the last dimension, where ``mask`` (bool, broadcastable to ``x``) is False.

    ``fixed_triu_mask`` makes the upper triangle the mask; torch_npu documents it as reserved, and MindSpeed uses it.
    """
    refuse = Refusal("npu_scaled_masked_softmax", "aclnnScaledMaskedSoftmax")
    if any(not 32 <= size <= 4096 or size % 32 for size in x.shape[-2:]):
        refuse.kernel(f"the last two dimensions of x must be multiples of 32 in [32, 4096], but got {list(x.shape)}")
    if any(size not in (1, full) for size, full in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
        refuse.kernel(f"mask {list(mask.shape)} cannot be broadcast to x {list(x.shape)}")

    def softmax(x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1) if fixed_triu_mask else mask
        return (x.float() * scale).masked_fill(hidden, -10000.0).softmax(-1).to(x.dtype)

    return differentiable(softmax)(x, mask)


ND = 2  # ACL_FORMAT_ND: the plain row-major format


@operator
def npu_dtype_cast(input: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """``input`` in another type."""
    if input_dtype is not None:
        raise NotSimulatedError("npu_dtype_cast with input_dtype is not simulated by simnpu")
    return input.to(dtype_of(dtype, input.dtype))


@operator
def npu_format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """``input``: private memory formats hold the same values."""
    if customize_dtype is not None or input_dtype is not None:
        raise NotSimulatedError("npu_format_cast with customize_dtype or input_dtype is not simulated by simnpu")
    return input


@overload("npu_format_cast.Tensor")
def npu_format_cast_like(
    input: Tensor, dst: Tensor, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """``input`` in the format of ``dst``."""
    return npu_format_cast(input, ND, customize_dtype=customize_dtype, input_dtype=input_dtype)


@operator
def get_npu_format(input: Tensor) -> int:
    """Return ACL_FORMAT_ND, the only format here."""
    return ND


@operator
def npu_confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """permute then reshape, or the other way round, as a contiguous tensor."""
    if transpose_first:
        return input.permute(*perm).reshape(*shape).contiguous()
    return input.reshape(*shape).permute(*perm).contiguous()
