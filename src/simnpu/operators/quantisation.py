"""Quantising tensors: by rows (``npu_dynamic_quant``), by blocks, with shared exponents (MX), and by given scales.

Formulas are those of torch_npu's documentation and of the OCP Microscaling Formats specification 1.0 (2023). To int8
and the two float8 types; int4, float4 and hifloat8 are not simulated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import on_host, operator
from simnpu.operators.quantised_types import Target, cast, dtype_of, target_of
from simnpu.operators.refusal import Refusal

E8M0_BIAS = 127
TRUNCATED = 0xFFFFE000  # the upper 19 bits of a float32
HAS_SCALE = 1 << 46


def scaled(wide: Tensor, scale: Tensor) -> Tensor:
    """wide / scale, and 0 where the scale is 0: then all that it scales is."""
    return torch.where(scale == 0, torch.zeros_like(wide), wide / scale)


@operator
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantise each row (the last dimension) by its largest magnitude: round(x / scale), and scale = max|x| / 127 in float32.

    ``smooth_scales`` multiplies the columns first: [H], or with ``group_index`` (int32, row ends of each group) [groups, H].
    """
    refuse = Refusal("npu_dynamic_quant", "aclnnDynamicQuantV2")
    if quant_mode != "pertoken" or dst_type_max:
        raise NotSimulatedError(f"npu_dynamic_quant with quant_mode {quant_mode}, dst_type_max {dst_type_max}")
    target = target_of(dst_type, torch.int8)
    rows = math.prod(input.shape[:-1])
    if group_index is not None and smooth_scales is None:
        refuse.kernel("group_index needs smooth_scales")
    if smooth_scales is not None:
        expected = [input.shape[-1]] if group_index is None else [group_index.numel(), input.shape[-1]]
        if list(smooth_scales.shape) != expected:
            refuse.kernel(f"smooth_scales must be {expected}, but got {list(smooth_scales.shape)}")

    def quantise(x: Tensor, smooth: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = x.float()
        if smooth is not None and ends is None:
            wide = wide * smooth.float()
        elif smooth is not None and ends is not None:
            sizes = ends.long().diff(prepend=torch.zeros(1, dtype=torch.int64))
            if int(sizes.min()) < 0 or int(ends[-1]) != rows:
                refuse.kernel(f"group_index must rise to the {rows} rows of x, but is {ends.tolist()}")
            wide = wide * smooth.float().repeat_interleave(sizes, 0).view_as(x)
        scale = wide.abs().amax(-1, keepdim=True) / target.largest
        return cast(scaled(wide, scale), target), scale.squeeze(-1)

    return on_host(quantise)(input, smooth_scales, group_index)


class BlockQuant(NamedTuple):
    y: Tensor
    scale: Tensor


@operator
def npu_dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> BlockQuant:
    """Blocks of the last two dimensions over their largest magnitudes: round(x / scale), and the scales in float32."""
    refuse = Refusal("npu_dynamic_block_quant", "aclnnDynamicBlockQuant")
    if round_mode != "rint" or min_scale < 0:
        refuse.kernel(f"round_mode must be rint and min_scale at least 0, but got {round_mode} and {min_scale}")
    if dst_type_max:
        raise NotSimulatedError(f"npu_dynamic_block_quant with dst_type_max {dst_type_max}")
    target = target_of(dst_type, torch.int8)
    sizes = (row_block_size, col_block_size)
    if target.is_integer and sizes != (1, 128):
        refuse.kernel(f"to int8 row_block_size must be 1 and col_block_size 128, but got {sizes[0]} and {sizes[1]}")
    if row_block_size not in (1, 128, 256, 512) or col_block_size not in (64, 128, 192, 256):
        refuse.kernel(
            f"row_block_size must be 1, 128, 256 or 512 and col_block_size 64, 128, 192 or 256, but got {sizes[0]} and "
            f"{sizes[1]}"
        )

    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        scale = (block_maxima(wide, sizes) / target.largest).clamp_min(min_scale)
        return cast(scaled(wide, spread(scale, sizes, wide.shape)), target), scale

    return BlockQuant(*on_host(quantise)(x))


def block_maxima(wide: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return the largest magnitude in each block of the last two dimensions; the last blocks may be smaller."""
    rows, columns = (-(-size // block) * block for size, block in zip(wide.shape[-2:], sizes, strict=True))
    padded = torch.nn.functional.pad(wide.abs(), (0, columns - wide.shape[-1], 0, rows - wide.shape[-2]))
    return padded.unflatten(-2, (-1, sizes[0])).unflatten(-1, (-1, sizes[1])).amax((-3, -1))


def spread(scale: Tensor, sizes: tuple[int, int], shape: torch.Size) -> Tensor:
    """Expand one scale a block to one an element."""
    rows = scale.repeat_interleave(sizes[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(sizes[1], -1)[..., : shape[-1]]


@operator
def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Blocks along ``axis`` with a shared power of two: x / 2^e in a float8 type, and the exponents.

    e = floor(log2(max|block|)) - the largest exponent of the type. Exponents come as uint8 codes e + 127 (E8M0), in pairs:
    [..., ceil(blocks / 2), ..., 2]; a block of zeros and the one that fills the last pair have code 0.
    """
    refuse = Refusal("npu_dynamic_mx_quant", "aclnnDynamicMxQuant")
    if not -input.dim() <= axis < input.dim():
        refuse("Param (axis) is out of input dimension range")
    if block_size % 32 or not 0 < block_size <= 1024:
        refuse("Param (block_size) must be divisible by 32 and no greater than 1024, greater than 0")
    if round_mode != "rint":
        refuse.kernel(f"to a float8 type round_mode must be rint, but got {round_mode}")
    if scale_alg or dst_type_max or max_low_bound:
        raise NotSimulatedError("npu_dynamic_mx_quant with scale_alg, dst_type_max or max_low_bound other than 0")
    target = target_of(dst_type, torch.int8)
    if target.is_integer:
        refuse.kernel("dst_type must be a float8 or float4 type, but got int8")
    return on_host(lambda x: microscaled(x, axis, block_size, target))(input)


def microscaled(x: Tensor, axis: int, block_size: int, target: Target) -> tuple[Tensor, Tensor]:
    """See :func:`npu_dynamic_mx_quant`."""
    wide = x.float().movedim(axis, -1)
    blocks = -(-wide.shape[-1] // block_size)
    padded = torch.nn.functional.pad(wide, (0, blocks * block_size - wide.shape[-1])).unflatten(
        -1, (blocks, block_size)
    )
    largest = padded.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 1 - target.exponent).clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = torch.where(largest == 0, -E8M0_BIAS, exponent)
    values = cast(torch.ldexp(padded, -exponent), target).flatten(-2)[..., : wide.shape[-1]]
    codes = (exponent.squeeze(-1) + E8M0_BIAS).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, blocks % 2)).unflatten(-1, (-1, 2))
    return values.movedim(-1, axis).contiguous(), codes.movedim(-2, axis if axis >= 0 else axis - 1).contiguous()


@operator
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1,
    div_mode: bool = True,
) -> Tensor:  # fmt: skip
    """round(input / scales) + zero_points (without ``div_mode`` times the scales), with one scale or one along ``axis``."""
    refuse = Refusal("npu_quantize", "aclnnAscendQuantV3")
    kind = dtype_of(dtype, torch.int8)
    axis %= input.dim()
    if scales.numel() not in (1, input.shape[axis]):
        refuse.kernel(f"scales must have 1 or {input.shape[axis]} elements, but got {list(scales.shape)}")

    def quantise(x: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        shape = [-1 if index == axis and scales.numel() > 1 else 1 for index in range(x.dim())]
        factor = scales.float().view(shape)
        scaled = x.float() / factor if div_mode else x.float() * factor
        if kind.is_floating_point:
            limit = torch.finfo(kind).max
            return scaled.clamp(-limit, limit).to(kind)
        if zero_points is not None:
            scaled = scaled + zero_points.float().view(shape)
        return scaled.round().clamp(torch.iinfo(kind).min, torch.iinfo(kind).max).to(kind)

    return on_host(quantise)(input, scales, zero_points)


@operator
def npu_trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """Encode a scale as :func:`npu_quant_matmul`'s int64: its upper 19 bits, a mark at bit 46, an offset from bit 37."""

    refuse = Refusal("npu_trans_quant_param", "aclnnTransQuantParamV2")
    if scale.dim() == 2 and scale.shape[0] != 1:
        refuse("the scale shape support only (1, ) and (1, n)")
    if round_mode not in (0, 1):
        refuse(f"round_mode should be 0 or 1, but round_mode is {round_mode}")
    shapes = [tuple(tensor.shape) for tensor in (scale, offset) if tensor is not None]
    if len(set(shapes)) > 1 and not (all(len(shape) == 1 for shape in shapes) and (1,) in shapes):
        refuse(f"shape of scale and offset should be equal, or one of them (1, ), but got {shapes}")

    def pack(scale: Tensor, offset: Tensor | None) -> Tensor:
        bits = (scale.round() if round_mode else scale).contiguous().view(torch.int32).long() & TRUNCATED | HAS_SCALE
        if offset is not None:
            bits = bits | (offset.round().clamp(-256, 255).long() & 0x1FF) << 37
        return bits

    return on_host(pack)(scale, offset)
