"""Heads that the kernel of queries, keys and values takes (:mod:`megascend.kernels.qkv_rope`). Pure; imports no torch."""

from __future__ import annotations

MAX_WIDTH = 256


def width_fits(width: int) -> bool:
    """Whether heads of ``width`` numbers are taken."""
    return _power_of_two(width) and width <= MAX_WIDTH


def rotary_fits(width: int, rotary: int) -> bool:
    """Whether ``rotary`` numbers of a head of ``width`` can be rotated: half of them, and what is left, are powers of two."""
    return 2 <= rotary <= width and _power_of_two(rotary) and (rotary == width or _power_of_two(width - rotary))


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
