"""Types that quantised operators are told by number: PyTorch's scalar types, and torch_npu's own behind 256.

A ``dst_type`` is PyTorch's number of a ``torch.dtype``, which the dispatcher makes of one, or CANN's plus 256
(torch_npu/csrc/custom_dtype).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simnpu.errors import NotSimulatedError


@dataclass(frozen=True)
class Target:
    """A type to quantise to: its largest number, and the exponent of the largest power of two below that."""

    dtype: torch.dtype
    largest: float
    exponent: int

    @property
    def is_integer(self) -> bool:
        return not self.dtype.is_floating_point


INT8 = Target(torch.int8, 127.0, 6)
TARGETS = {
    torch.int8: INT8,
    torch.float8_e5m2: Target(torch.float8_e5m2, 57344.0, 15),
    torch.float8_e4m3fn: Target(torch.float8_e4m3fn, 448.0, 8),
}
OFFSET = 256
SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 11: torch.bool, 12: torch.int8, 13: torch.uint8, 14: torch.int32, 15: torch.bfloat16,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 44: torch.float8_e8m0fnu,
}  # fmt: skip
"""PyTorch's types by number; its quantised ones (12 to 14) as the integers that hold them."""
NUMBERS: dict[int, torch.dtype] = {
    **SCALAR_TYPES,
    OFFSET + 0: torch.float32,
    OFFSET + 1: torch.float16,
    OFFSET + 2: torch.int8,
    OFFSET + 3: torch.int32,
    OFFSET + 27: torch.bfloat16,
    OFFSET + 35: torch.float8_e5m2,
    OFFSET + 36: torch.float8_e4m3fn,
    OFFSET + 37: torch.float8_e8m0fnu,
}
PUBLIC = {
    "float8_e5m2": OFFSET + 35,
    "float8_e4m3fn": OFFSET + 36,
    "float8_e8m0fnu": OFFSET + 37,
    "hifloat8": OFFSET + 34,
    "float4_e2m1fn_x2": OFFSET + 40,
    "float4_e1m2fn_x2": OFFSET + 41,
}
"""Names in ``torch_npu``, by which programs name types that PyTorch may not have."""


def dtype_of(kind: int | None, otherwise: torch.dtype) -> torch.dtype:
    """Return the type that ``kind`` stands for."""
    if kind is None:
        return otherwise
    if kind not in NUMBERS:
        name = next((name for name, number in PUBLIC.items() if number == kind), str(kind))
        raise NotSimulatedError(f"the type {name} is not simulated by simnpu")
    return NUMBERS[kind]


def target_of(kind: int | None, otherwise: torch.dtype) -> Target:
    """Return the dtype to quantise to."""
    dtype = dtype_of(kind, otherwise)
    if dtype not in TARGETS:
        raise NotSimulatedError(
            f"quantisation to {dtype} is not simulated by simnpu (simulated: {', '.join(map(str, TARGETS))})"
        )
    return TARGETS[dtype]


def cast(values: torch.Tensor, target: Target) -> torch.Tensor:
    """``values`` rounded to the nearest number of the type, ties to even, limited to its range."""
    limited = values.clamp(-target.largest - target.is_integer, target.largest)
    return (limited.round() if target.is_integer else limited).to(target.dtype)
