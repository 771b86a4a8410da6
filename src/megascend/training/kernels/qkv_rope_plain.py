"""QKV split, QK-norm and rotary embedding in plain torch, and a wrapper that tests a kernel against it before use."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

logger = logging.getLogger(__name__)

BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Bounds of relative differences (Euclidean norms) between results that are rounded once and several times, by dtype."""
TOKENS, SEQUENCES = 70, (0, 41, 70, 70)
"""Sizes of the trial: not a multiple of a tile; the last sequence is empty."""
EPS = 1e-6

Norms = tuple[Tensor, Tensor, float]


class QkvRope(Protocol):
    """Signature of ``qkv_rope.qkv_rope`` (which documents the arguments) and of its replacements."""

    def __call__(
        self, mixed: Tensor, angles: Tensor, starts: Tensor | None, norms: Norms | None, groups: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def plain_qkv_rope(
    mixed: Tensor, angles: Tensor, starts: Tensor | None, norms: Norms | None, groups: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`megascend.training.kernels.qkv_rope.qkv_rope` step by step."""
    tokens, batch, _ = mixed.shape
    parts = mixed.view(tokens, batch, groups, -1, width)
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    if norms is not None:
        query, key = (rms_norm(x, (width,), weight, norms[2]) for x, weight in ((query, norms[0]), (key, norms[1])))
    position = torch.arange(tokens, device=mixed.device)
    if starts is not None:
        position = position - starts[torch.searchsorted(starts, position, right=True) - 1]
    angle = angles[position, 0, 0][:, None, None]

    def rotated(x: Tensor) -> Tensor:
        rotary, rest = x[..., : angle.shape[-1]].to(angle.dtype), x[..., angle.shape[-1] :]
        first, second = rotary.chunk(2, -1)
        rotary = rotary * angle.cos() + torch.cat([-second, first], -1) * angle.sin()
        return torch.cat([rotary.to(x.dtype), rest], -1).contiguous()

    return rotated(query), rotated(key), value.contiguous()


class QkvRopeCase(NamedTuple):
    """The properties of a call that determine the compiled kernels."""

    dtype: torch.dtype
    groups: int
    heads: int
    width: int
    rotary: int
    packed: bool
    norms: bool
    trained: bool


class VerifiedKernel:
    """A kernel that is used only after it agreed with plain torch on this device; plain torch is the fallback.

    The first call of each kind runs a trial on random numbers, which synchronizes with the device.
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
        # Compilers and drivers vary, and silently wrong numbers are the worst failure of a kernel.
        if kind not in self._agrees:
            self._agrees[kind] = self._try(kind, mixed.device)
        compute = self._kernel if self._agrees[kind] else plain_qkv_rope
        return compute(mixed, angles, starts, norms, groups, width)

    def _try(self, kind: QkvRopeCase, device: torch.device) -> bool:
        results, references = (trial(compute, kind, device) for compute in (self._kernel, plain_qkv_rope))
        differences = [
            float((result.double() - reference.double()).norm() / reference.double().norm())
            for result, reference in zip(results, references, strict=True)
        ]
        agrees = all(difference <= BOUNDS[kind.dtype] for difference in differences)  # False for NaN
        if not agrees:
            logger.warning(
                "the kernel for q, k and v does not compute what torch does on this device (%s: relative differences %s): "
                "it is not used, and steps take longer. Please report it, with the versions of torch and triton",
                kind,
                " ".join(f"{difference:.1e}" for difference in differences),
            )
        return agrees


def trial(compute: QkvRope, kind: QkvRopeCase, device: torch.device) -> list[Tensor]:
    """Return q, k, v, the gradient of the projection and, if they are trained, those of the norms' weights."""
    # A separate generator: the trial must not advance the random stream of the training.
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
        out_grads = [numbers(*tensor.shape).to(device, kind.dtype) for tensor in out]
        grads = torch.autograd.grad(out, [mixed, *(weights if kind.trained else [])], out_grads)
    return [tensor.detach() for tensor in (*out, *grads)]
