"""Head sizes that the kernels of a head (``qkv_rope``, ``head_norm``) support. Pure; does not import torch."""

from __future__ import annotations

MAX_WIDTH = 256


def width_fits(width: int) -> bool:
    """Check whether heads of ``width`` elements are supported."""
    return _power_of_two(width) and width <= MAX_WIDTH


def rotary_fits(width: int, rotary: int) -> bool:
    """Check whether ``rotary`` elements of a head of ``width`` can be rotated: ``rotary`` and the rest are powers of two."""
    return 2 <= rotary <= width and _power_of_two(rotary) and (rotary == width or _power_of_two(width - rotary))


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
