"""Rotary position embedding: ``npu_rotary_mul``, ``npu_rotary_position_embedding`` (the name MindSpeed builds), and
``npu_apply_rotary_pos_emb`` for inference.

Formula: Su et al., RoFormer, arXiv:2104.09864; x * cos + rotate(x) * sin, where rotate swaps the halves of the last
dimension (``half``) or neighbours (``interleave``) and negates the first of each pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import differentiable, extension, on_host, operator, to_host
from simnpu.operators.refusal import Refusal

MODES = ("half", "interleave")
MAX_DIM = 896  # of a head, not reached
MAX_COUNT = 1000  # of the batch and of heads (half), of their product (interleave), not reached
MAX_PRODUCT_WITH_GRADIENTS = 1024  # batch times heads where cos or sin need a gradient (half), may be reached


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
    """Check as the kernel does, then rotate."""
    refuse = Refusal(name, "aclnnRotaryPositionEmbedding")
    if mode not in MODES:
        refuse(f"The rotary_mode of {name} should be half or interleave, but got {mode}")
    if x.shape[-1] % 2 or x.shape[-1] >= MAX_DIM:
        refuse.kernel(f"the last dimension of x must be even and less than {MAX_DIM}, but got {x.shape[-1]}")
    if cos.shape != sin.shape or cos.dim() != x.dim() or cos.shape[-1] != x.shape[-1]:
        refuse.kernel(f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit x {list(x.shape)}")
    if any(size not in (1, full) for size, full in zip(cos.shape, x.shape, strict=True)):
        refuse.kernel(f"cos {list(cos.shape)} cannot be broadcast to x {list(x.shape)}")
    check_counts(x, cos, mode, cos.requires_grad or sin.requires_grad, refuse)
    if any(bool((to_host(tensor).abs() > 1).any()) for tensor in (cos, sin)):
        refuse.kernel("cos and sin must be in [-1, 1]; scale x instead (YaRN's attention factor)")
    return differentiable(rotary)(x, cos, sin, mode)


def check_counts(x: Tensor, cos: Tensor, mode: str, gradients: bool, refuse: Refusal) -> None:
    """Batch size B and number of heads N, which follow from what ``cos`` is broadcast over, and their limits."""
    layouts = layouts_of(tuple(x.shape), tuple(cos.shape), mode)
    if not layouts:
        refuse.kernel(
            f"cos {list(cos.shape)} fits none of the layouts of x {list(x.shape)}: {', '.join(LAYOUTS[mode])}"
        )
    if mode == "interleave":
        if not any(batch * heads < MAX_COUNT for batch, heads in layouts):
            refuse.kernel(f"interleave mode: B * N must be less than {MAX_COUNT}, but got B, N = {layouts[0]}")
        return
    if not any(max(counts) < MAX_COUNT for counts in layouts):
        refuse.kernel(f"half mode: B and N must be less than {MAX_COUNT}, but got B, N = {layouts[0]}")
    if gradients and not any(batch * heads <= MAX_PRODUCT_WITH_GRADIENTS for batch, heads in layouts):
        refuse.kernel(
            f"half mode: with gradients of cos and sin B * N must be at most {MAX_PRODUCT_WITH_GRADIENTS}, but got B, N "
            f"= {layouts[0]}"
        )


LAYOUTS = {
    "half": ("BNSD: 11SD B1SD BNSD", "BSND: 1S1D BS1D BSND", "SBND: S11D SB1D SBND", "TND: T1D TND"),
    "interleave": ("BNSD: 11SD", "BSND: 1S1D", "SBND: S11D", "TND: T1D"),
}
"""Layouts of ``x``, and of ``cos`` and ``sin`` for each (torch_npu's documentation of npu_rotary_mul)."""


def layouts_of(x: tuple[int, ...], cos: tuple[int, ...], mode: str) -> list[tuple[int, int]]:
    """B and N of every layout that the two shapes can have; a packed one (TND) has one batch."""
    layouts = []
    for line in LAYOUTS[mode]:
        layout, _, forms = line.partition(": ")
        if len(layout) != len(x):
            continue
        sizes = dict(zip(layout, x, strict=True))
        if any(cos == tuple(sizes.get(axis, 1) for axis in form) for form in forms.split()):
            layouts.append((sizes.get("B", 1), sizes["N"]))
    return layouts


@operator
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """``input`` rotated by the angles whose cosines and sines are ``r1`` and ``r2``."""
    if rotate is not None:
        raise NotSimulatedError("npu_rotary_mul with a rotation matrix is not simulated by simnpu")
    return apply_rotary("npu_rotary_mul", input, r1, r2, rotary_mode)


@extension
def npu_rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Compute :func:`npu_rotary_mul`; ``mode`` 0 is half, 1 interleave."""
    if mode not in (0, 1):
        Refusal("npu_rotary_position_embedding", "aclnnRotaryPositionEmbedding").kernel(f"mode must be 0 or 1: {mode}")
    return apply_rotary("npu_rotary_position_embedding", x, cos, sin, MODES[mode])


ROTARY_DIMS = (64, 128)


@operator
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate ``query`` and ``key`` in place, and return them.

    Shapes are [B, S, N, D], cos and sin [B, S, 1, D]; with layout ``TND`` the first two are one.
    """
    refuse = Refusal("npu_apply_rotary_pos_emb", "aclnnApplyRotaryPosEmbV2")
    tensors = (query, key, cos, sin)
    if rotary_mode not in ("half", "quarter", "interleave"):
        refuse(f"The layout should be half/quarter/interleave, but got {rotary_mode}")
    if rotary_mode != "half" or layout not in ("BSND", "TND"):
        refuse.kernel(f"a 910B takes layout BSND or TND and rotary_mode half, but got {layout} and {rotary_mode}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        refuse.kernel("query, key, cos and sin must have one type, but got " + ", ".join(str(t.dtype) for t in tensors))
    if any(tensor.dim() != len(layout) for tensor in tensors):
        refuse.kernel(f"layout {layout} needs {len(layout)} dimensions, but got {[t.dim() for t in tensors]}")
    dim = query.shape[-1]
    if dim not in ROTARY_DIMS:
        refuse.kernel(f"the last dimension must be 64 or 128, but got {dim}")
    leading = query.shape[:-2]
    if key.shape[:-2] != leading or key.shape[-1] != dim or cos.shape != sin.shape or cos.shape != (*leading, 1, dim):
        refuse.kernel(f"query, key, cos and sin do not fit together: {[list(t.shape) for t in tensors]}")

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[()]:
        for tensor in (query, key):
            tensor.copy_(rotary(tensor, cos, sin, "half"))
        return ()

    on_host(turn)(query, key, cos, sin)
    return query, key
