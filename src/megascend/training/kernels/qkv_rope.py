"""Fused QKV split, QK-norm and rotary embedding, in two Triton kernels.

The forward kernel splits the fused projection, applies QK-norm and the rotary embedding and writes q, k and v; the backward
kernel writes the projection's gradient as one tensor, without a concatenation. Both read and write every element once.

The rotary embedding is that of Transformer Engine's fused kernel: halves are rotated against each other, in fp32, from a table
of angles. Between norm and rotation values stay in fp32, where separate kernels would round them to the dtype of the
projection. Gradients of the norms' weights are summed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements of one head in a tile: 16 tokens of 128. The backward kernel then uses 128 registers a thread and 16-byte loads."""
MAX_TOKENS = 64
PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _sin_cos(x):
    """Return sine and cosine, to 2e-7 for angles below a million, without libdevice's branch for huge angles.

    The angle is reduced by the nearest multiple of pi / 2, given in three parts, and put into Cephes' polynomials (sinf.c).
    """
    turns = tl.floor(x * 0.636619772 + 0.5)
    rest = tl.fma(turns, -1.57079637, x)
    rest = tl.fma(turns, 4.37113883e-8, rest)
    rest = tl.fma(turns, 1.71512489e-15, rest)
    square = rest * rest
    sine = rest + rest * square * (-1.66666546e-1 + square * (8.33216087e-3 - square * 1.95152959e-4))
    cosine = 1.0 - 0.5 * square + square * square * (4.16666457e-2 + square * (2.44331571e-5 * square - 1.38873163e-3))
    quarter = turns.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    sin, cos = tl.where(odd, cosine, sine), tl.where(odd, sine, cosine)
    return tl.where(quarter >= 2, -sin, sin), tl.where((quarter == 1) | (quarter == 2), -cos, cos)


@triton.jit
def _sin_cos_of(
    token, inside, angles, starts, batch, positions, sequences, HALF: tl.constexpr, PACKED: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Return sine and cosine [TOKENS, HALF] of the tokens' positions, which count within each packed sequence."""
    position = token // batch
    # The start of the token's sequence: the largest one that is not after it.
    if PACKED:
        index = tl.arange(0, 32)
        begin = tl.zeros([TOKENS], tl.int32)
        for first in range(0, sequences, 32):
            start = tl.load(starts + first + index, mask=first + index < sequences, other=2147483647)[None, :]
            begin = tl.maximum(begin, tl.max(tl.where(start <= token[:, None], start, 0), 1))
        position = token - begin
    angle_ptrs = angles + position.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    return _sin_cos(tl.load(angle_ptrs, mask=inside & (position < positions)[:, None], other=0.0))


@triton.jit
def _load(pointers, inside):
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointers, values, inside):
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _head(x_ptrs, out_ptrs, gain, sin, cos, inside, eps, HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr):
    """Process one query head, or the key head, of a tile's tokens."""
    column = tl.arange(0, HALF)
    first, second = _load(x_ptrs + column[None, :], inside), _load(x_ptrs + HALF + column[None, :], inside)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)
    if REST:
        rest_column = 2 * HALF + tl.arange(0, REST)
        rest = _load(x_ptrs + rest_column[None, :], inside)
        if NORM:
            squares += tl.sum(rest * rest, 1)
    if NORM:
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        first = first * scale * tl.load(gain + column).to(tl.float32)[None, :]
        second = second * scale * tl.load(gain + HALF + column).to(tl.float32)[None, :]
        if REST:
            rest = rest * scale * tl.load(gain + rest_column).to(tl.float32)[None, :]
    _store(out_ptrs + column[None, :], first * cos - second * sin, inside)
    _store(out_ptrs + HALF + column[None, :], second * cos + first * sin, inside)
    if REST:
        _store(out_ptrs + rest_column[None, :], rest, inside)


# These sizes change between micro batches; Triton would compile variants for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["tokens", "batch", "positions", "sequences"])
def _forward_kernel(
    mixed, query_gain, key_gain, angles, starts, query, key, value, tokens, batch, groups, positions, sequences, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Process one group of heads of TOKENS tokens."""
    WIDTH: tl.constexpr = 2 * HALF + REST
    program = tl.program_id(0)
    token, group = (program // groups) * TOKENS + tl.arange(0, TOKENS), program % groups
    inside = (token < tokens)[:, None]
    sin, cos = _sin_cos_of(token, inside, angles, starts, batch, positions, sequences, HALF, PACKED, TOKENS)
    row = token.to(tl.int64)[:, None] * groups + group
    mixed_ptrs, query_ptrs = mixed + row * ((HEADS + 2) * WIDTH), query + row * (HEADS * WIDTH)
    for head in range(HEADS):
        _head(mixed_ptrs + head * WIDTH, query_ptrs + head * WIDTH, query_gain, sin, cos, inside, eps, HALF, REST, NORM)
    _head(mixed_ptrs + HEADS * WIDTH, key + row * WIDTH, key_gain, sin, cos, inside, eps, HALF, REST, NORM)
    column = tl.arange(0, WIDTH)[None, :]
    copied = tl.load(mixed_ptrs + (HEADS + 1) * WIDTH + column, mask=inside)
    tl.store(value + row * WIDTH + column, copied, mask=inside)


@triton.jit
def _head_back(
    grad_ptrs, x_ptrs, dx_ptrs, gain, sin, cos, inside, eps, first_sum, second_sum, rest_sum,
    HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write one head's gradient; return the sums for the norm's weight with this head's part added."""
    column = tl.arange(0, HALF)
    first_grad, second_grad = (
        _load(grad_ptrs + column[None, :], inside),
        _load(grad_ptrs + HALF + column[None, :], inside),
    )
    # The transpose of the rotation.
    first, second = first_grad * cos + second_grad * sin, second_grad * cos - first_grad * sin
    if REST:
        rest_column = 2 * HALF + tl.arange(0, REST)
        rest = _load(grad_ptrs + rest_column[None, :], inside)
    if NORM:
        x_first, x_second = (
            _load(x_ptrs + column[None, :], inside),
            _load(x_ptrs + HALF + column[None, :], inside),
        )
        squares = tl.sum(x_first * x_first + x_second * x_second, 1)
        if REST:
            x_rest = _load(x_ptrs + rest_column[None, :], inside)
            squares += tl.sum(x_rest * x_rest, 1)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        x_first, x_second = x_first * scale, x_second * scale
        first_sum += first * x_first
        second_sum += second * x_second
        first = first * tl.load(gain + column).to(tl.float32)[None, :]
        second = second * tl.load(gain + HALF + column).to(tl.float32)[None, :]
        products = tl.sum(first * x_first + second * x_second, 1)
        if REST:
            x_rest = x_rest * scale
            rest_sum += rest * x_rest
            rest = rest * tl.load(gain + rest_column).to(tl.float32)[None, :]
            products += tl.sum(rest * x_rest, 1)
        mean = (products / (2 * HALF + REST))[:, None]
        first, second = scale * (first - x_first * mean), scale * (second - x_second * mean)
        if REST:
            rest = scale * (rest - x_rest * mean)
    _store(dx_ptrs + column[None, :], first, inside)
    _store(dx_ptrs + HALF + column[None, :], second, inside)
    if REST:
        _store(dx_ptrs + rest_column[None, :], rest, inside)
    return first_sum, second_sum, rest_sum


@triton.jit
def _store_sums(partial, first_sum, second_sum, rest_sum, HALF: tl.constexpr, REST: tl.constexpr):
    column = tl.arange(0, HALF)
    tl.store(partial + column, tl.sum(first_sum, 0))
    tl.store(partial + HALF + column, tl.sum(second_sum, 0))
    if REST:
        tl.store(partial + 2 * HALF + tl.arange(0, REST), tl.sum(rest_sum, 0))


@triton.jit(do_not_specialize=["tokens", "batch", "positions", "sequences"])
def _backward_kernel(
    query_grad, key_grad, value_grad, mixed, query_gain, key_gain, angles, starts, grad, partial, tokens, batch, groups,
    positions, sequences, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr, SUMS: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Process a share of the tiles; with SUMS write one row of ``partial`` sums of both weights' gradients a program."""
    WIDTH: tl.constexpr = 2 * HALF + REST
    # Triton has no empty tensors.
    REST_SIZE: tl.constexpr = REST if REST > 0 else 1
    query_first, query_second = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
    key_first, key_second = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
    query_rest, key_rest = tl.zeros([TOKENS, REST_SIZE], tl.float32), tl.zeros([TOKENS, REST_SIZE], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS) * groups, tl.num_programs(0)):
        token, group = (tile // groups) * TOKENS + tl.arange(0, TOKENS), tile % groups
        inside = (token < tokens)[:, None]
        sin, cos = _sin_cos_of(token, inside, angles, starts, batch, positions, sequences, HALF, PACKED, TOKENS)
        row = token.to(tl.int64)[:, None] * groups + group
        x_ptrs, dx_ptrs = mixed + row * ((HEADS + 2) * WIDTH), grad + row * ((HEADS + 2) * WIDTH)
        for head in range(HEADS):
            grad_ptrs = query_grad + row * (HEADS * WIDTH) + head * WIDTH
            query_first, query_second, query_rest = _head_back(
                grad_ptrs, x_ptrs + head * WIDTH, dx_ptrs + head * WIDTH, query_gain, sin, cos, inside, eps,
                query_first, query_second, query_rest, HALF, REST, NORM,
            )  # fmt: skip
        key_first, key_second, key_rest = _head_back(
            key_grad + row * WIDTH, x_ptrs + HEADS * WIDTH, dx_ptrs + HEADS * WIDTH, key_gain, sin, cos, inside, eps,
            key_first, key_second, key_rest, HALF, REST, NORM,
        )  # fmt: skip
        column = tl.arange(0, WIDTH)[None, :]
        copied = tl.load(value_grad + row * WIDTH + column, mask=inside)
        tl.store(dx_ptrs + (HEADS + 1) * WIDTH + column, copied, mask=inside)
    if SUMS:
        partial += tl.program_id(0) * (2 * WIDTH)
        _store_sums(partial, query_first, query_second, query_rest, HALF, REST)
        _store_sums(partial + WIDTH, key_first, key_second, key_rest, HALF, REST)


class _QkvRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        eps: float,
        angles: Tensor,
        starts: Tensor | None,
        groups: int,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, (tokens, batch) = mixed.contiguous(), mixed.shape[:2]
        heads, half = mixed.shape[-1] // (groups * width) - 2, angles.shape[-1] // 2
        query = mixed.new_empty(tokens, batch, groups * heads, width)
        key, value = mixed.new_empty(tokens, batch, groups, width), mixed.new_empty(tokens, batch, groups, width)
        tile = _tile(width)
        programs = triton.cdiv(tokens * batch, tile) * groups
        if programs:
            _forward_kernel[(programs,)](  # type: ignore[reportIndexIssue]
                mixed, query_weight, key_weight, angles, starts, query, key, value, tokens * batch, batch, groups,
                len(angles), 0 if starts is None else len(starts), eps,
                HEADS=heads, HALF=half, REST=width - 2 * half, NORM=query_weight is not None, PACKED=starts is not None,
                TOKENS=tile, num_warps=4,
            )  # fmt: skip
        # Without norms the backward pass only rotates the gradients, and does not need the input.
        saved_mixed = None if query_weight is None else mixed
        ctx.save_for_backward(saved_mixed, query_weight, key_weight, angles, starts)
        ctx.eps = eps
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, angles, starts = ctx.saved_tensors
        # The kernel computes addresses from shapes; gradients may be transposed views.
        query_grad, key_grad, value_grad = (grad.contiguous() for grad in grads)
        tokens, batch, groups, width = key_grad.shape
        heads, half = query_grad.shape[2] // groups, angles.shape[-1] // 2
        grad = key_grad.new_empty(tokens, batch, groups * (heads + 2) * width)
        tile = _tile(width)
        programs = triton.cdiv(tokens * batch, tile) * groups
        sums, partial = any(ctx.needs_input_grad[1:3]), None
        if sums:
            processors = torch.cuda.get_device_properties(grad.device).multi_processor_count
            # Few programs with several tiles each, so that few rows of partial sums are added up.
            programs = min(programs, PROGRAMS_PER_PROCESSOR * processors)
            partial = torch.empty(programs, 2, width, dtype=torch.float32, device=grad.device)
        if programs:
            _backward_kernel[(programs,)](  # type: ignore[reportIndexIssue]
                query_grad, key_grad, value_grad, grad if mixed is None else mixed,  # which is not read then
                query_weight, key_weight, angles, starts, grad, partial, tokens * batch, batch,
                groups, len(angles), 0 if starts is None else len(starts), ctx.eps,
                HEADS=heads, HALF=half, REST=width - 2 * half, NORM=mixed is not None, SUMS=sums,
                PACKED=starts is not None, TOKENS=tile, num_warps=4,
            )  # fmt: skip
        query_weight_grad = key_weight_grad = None
        if partial is not None:
            total = partial.sum(0)
            query_weight_grad, key_weight_grad = total[0].to(query_weight.dtype), total[1].to(key_weight.dtype)
        return grad, query_weight_grad, key_weight_grad, None, None, None, None, None


def _tile(width: int) -> int:
    """Return the number of tokens of a tile."""
    return min(MAX_TOKENS, TILE // width)


def qkv_rope(
    mixed: Tensor,
    angles: Tensor,
    starts: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    groups: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused projection's output into the queries, keys and values of attention.

    Args:
        mixed: [tokens, batch, groups * (heads of a group + 2) * width]: for each group its query heads, its key, its value.
        angles: float32 [positions, 1, 1, rotary width], contiguous; both halves of a row are equal. The first ``rotary width``
            elements of a head are rotated; ``rotary width`` and the number of other elements must be powers of two.
        starts: int32 [sequences + 1], on the device: the start of each packed sequence in ``mixed`` [tokens, 1, ...],
            ascending, and the end of the last one. None: row ``i`` of ``mixed`` is at position ``i``.
        norms: weights [width] of the RMSNorm of queries and of keys, and epsilon. None: no QK-norm.

    Returns:
        q [tokens, batch, groups * heads, width], k and v [tokens, batch, groups, width], contiguous, in the dtype of ``mixed``.
    """
    query, key, eps = (None, None, 0.0) if norms is None else norms
    return _QkvRope.apply(mixed, query, key, eps, angles, starts, groups, width)
