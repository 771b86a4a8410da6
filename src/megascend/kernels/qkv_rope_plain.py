"""Queries, keys and values from the fused projection in plain torch, and the kernels of it, trusted once they have agreed."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

logger = logging.getLogger(__name__)

BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of relative differences (Euclidean norms), by dtype: between results that are rounded once and several times."""
TOKENS, SEQUENCES = 70, (0, 41, 70, 70)
"""Of the trial: no multiple of a tile; sequences of which the last one is empty."""
EPS = 1e-6

Norms = tuple[Tensor, Tensor, float]


class QkvRope(Protocol):
    """:func:`megascend.kernels.qkv_rope.qkv_rope`, which says what is what, or something else that computes it."""

    def __call__(
        self, mixed: Tensor, angles: Tensor, starts: Tensor | None, norms: Norms | None, groups: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def plain_qkv_rope(
    mixed: Tensor, angles: Tensor, starts: Tensor | None, norms: Norms | None, groups: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`megascend.kernels.qkv_rope.qkv_rope`, one step after the other."""
    tokens, batch, _ = mixed.shape
    parts = mixed.view(tokens, batch, groups, -1, width)
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    if norms is not None:
        query, key = (rms_norm(of, (width,), weight, norms[2]) for of, weight in ((query, norms[0]), (key, norms[1])))
    place = torch.arange(tokens, device=mixed.device)
    if starts is not None:
        place = place - starts[torch.searchsorted(starts, place, right=True) - 1]
    angle = angles[place, 0, 0][:, None, None]

    def rotated(of: Tensor) -> Tensor:
        turned, kept = of[..., : angle.shape[-1]].to(angle.dtype), of[..., angle.shape[-1] :]
        one, other = turned.chunk(2, -1)
        turned = turned * angle.cos() + torch.cat([-other, one], -1) * angle.sin()
        return torch.cat([turned.to(of.dtype), kept], -1).contiguous()

    return rotated(query), rotated(key), value.contiguous()


class QkvRopeCase(NamedTuple):
    """What decides which kernels a call takes."""

    dtype: torch.dtype
    groups: int
    heads: int
    width: int
    rotary: int
    packed: bool
    norms: bool
    trained: bool


class Trusted:
    """A kernel that has to agree with plain torch on this device before its results are used; else plain torch is.

    The trial of each kind of call comes with the first one, on numbers of its own, and waits for the device. Compilers and
    drivers are many, and numbers that are wrong without a word are the worst that a kernel can give.
    """

    def __init__(self, kernel: QkvRope) -> None:
        self._kernel = kernel
        self._agrees: dict[QkvRopeCase, bool] = {}

    def __call__(
        self, mixed: Tensor, angles: Tensor, starts: Tensor | None, norms: Norms | None, groups: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        trained = norms is not None and norms[0].requires_grad
        heads = mixed.shape[-1] // (groups * width) - 2
        kind = QkvRopeCase(
            mixed.dtype, groups, heads, width, angles.shape[-1], starts is not None, norms is not None, trained
        )
        if kind not in self._agrees:
            self._agrees[kind] = self._try(kind, mixed.device)
        compute = self._kernel if self._agrees[kind] else plain_qkv_rope
        return compute(mixed, angles, starts, norms, groups, width)

    def _try(self, kind: QkvRopeCase, device: torch.device) -> bool:
        mine, right = (trial(compute, kind, device) for compute in (self._kernel, plain_qkv_rope))
        apart = [
            float((one.double() - other.double()).norm() / other.double().norm())
            for one, other in zip(mine, right, strict=True)
        ]
        agrees = all(difference <= BOUNDS[kind.dtype] for difference in apart)  # which NaN is not
        if not agrees:
            logger.warning(
                "the kernel for q, k and v does not compute what torch does on this device (%s: relative differences %s): "
                "it is not used, and steps take longer. Please report it, with the versions of torch and triton",
                kind,
                " ".join(f"{difference:.1e}" for difference in apart),
            )
        return agrees


def trial(compute: QkvRope, kind: QkvRopeCase, device: torch.device) -> list[Tensor]:
    """q, k, v, and the gradients of the projection and, if they are trained, of the norms."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    batch = 1 if kind.packed else 2
    mixed = numbers(TOKENS // batch, batch, kind.groups * (kind.heads + 2) * kind.width)
    steps = 1e4 ** -(torch.arange(0, kind.rotary, 2) / kind.rotary)
    angles = torch.outer(torch.arange(float(TOKENS)), steps).repeat(1, 2)[:, None, None].contiguous().to(device)
    starts = torch.tensor(SEQUENCES, dtype=torch.int32, device=device) if kind.packed else None
    with torch.enable_grad():
        mixed = mixed.to(device, kind.dtype).requires_grad_()
        weights = [(1 + 0.3 * numbers(kind.width)).to(device, kind.dtype).requires_grad_(kind.trained) for _ in "qk"]
        norms = (weights[0], weights[1], EPS) if kind.norms else None
        out = compute(mixed, angles, starts, norms, kind.groups, kind.width)
        grads = [numbers(*of.shape).to(device, kind.dtype) for of in out]
        found = torch.autograd.grad(out, [mixed, *(weights if kind.trained else [])], grads)
    return [of.detach() for of in (*out, *found)]
