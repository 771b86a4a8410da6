"""Rotary position embedding: ``npu_rotary_mul`` and, under the name MindSpeed builds, ``npu_rotary_position_embedding``.

Formula: Su et al., RoFormer, arXiv:2104.09864; x * cos + rotate(x) * sin, where rotate swaps the halves of the last
dimension (``half``) or neighbours (``interleave``) and negates the first of each pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascend.simnpu.missing import NotSimulatedError
from megascend.simnpu.operators.dispatch import differentiable, operator
from megascend.simnpu.operators.refusal import Refusal

MODES = ("half", "interleave")


def rotate(x: Tensor, mode: str) -> Tensor:
    """(-second, first) of each pair."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    wide = x.float()
    return (wide * cos.float() + rotate(wide, mode) * sin.float()).to(x.dtype)


def apply_rotary(name: str, x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Check as the kernel does, then rotate.

    Raises:
        RuntimeError: shapes or the mode are not accepted.
    """
    refuse = Refusal(name, "aclnnRotaryPositionEmbedding")
    if mode not in MODES:
        refuse(f"The rotary_mode should be half or interleave, but got {mode}")
    if x.dim() != 4:
        refuse.kernel(f"x must have 4 dimensions, but got {x.dim()}")
    if x.shape[-1] % 2:
        refuse.kernel(f"the last dimension of x must be even, but got {x.shape[-1]}")
    if cos.shape != sin.shape or cos.dim() != x.dim() or cos.shape[-1] != x.shape[-1]:
        refuse.kernel(f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit x {list(x.shape)}")
    if any(size not in (1, full) for size, full in zip(cos.shape, x.shape, strict=True)):
        refuse.kernel(f"cos {list(cos.shape)} cannot be broadcast to x {list(x.shape)}")
    return differentiable(rotary)(x, cos, sin, mode)


@operator
def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """``self`` rotated by the angles whose cosines and sines are ``r1`` and ``r2``."""
    if rotate is not None:
        raise NotSimulatedError("npu_rotary_mul with a rotation matrix is not simulated by megascend.simnpu")
    return apply_rotary("npu_rotary_mul", self, r1, r2, rotary_mode)


@operator
def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """As :func:`npu_rotary_mul`; ``mode`` 0 is half, 1 interleave."""
    if mode not in (0, 1):
        Refusal("npu_rotary_position_embedding", "aclnnRotaryPositionEmbedding").kernel(f"mode must be 0 or 1: {mode}")
    return apply_rotary("npu_rotary_position_embedding", x, cos, sin, MODES[mode])
