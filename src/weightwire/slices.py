"""Arithmetic of slices: boxes of a tensor, by offsets and sizes along each dimension. Pure, no torch.

The geometry is that of :mod:`megascend.training.checkpoint.slices`, which imports it from here: an engine's environment has no
megascend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a slice."""


def overlap(a: Sequence[int], a_sizes: Sequence[int], b: Sequence[int], b_sizes: Sequence[int]) -> Box | None:
    """Return (offsets, sizes) of the intersection of two slices of one tensor, or None if it is empty."""
    starts = tuple(max(x, y) for x, y in zip(a, b, strict=True))
    stops = (min(x + m, y + n) for x, m, y, n in zip(a, a_sizes, b, b_sizes, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def index_of(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index that selects a slice of a tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def difference(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint slices that cover ``box`` without ``hole``, which lies within it."""
    (offsets, sizes), (hole_offsets, hole_sizes) = box, hole
    before: list[tuple[int, int]] = []
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        low, high = hole_offsets[dim], hole_offsets[dim] + hole_sizes[dim]
        rest = list(zip(offsets[dim + 1 :], sizes[dim + 1 :], strict=True))
        for part in ((start, low - start), (high, start + size - high)):
            if part[1] > 0:
                sides = [*before, part, *rest]
                yield tuple(side[0] for side in sides), tuple(side[1] for side in sides)
        before.append((low, high - low))


def subtract(boxes: Sequence[Box], hole: Box) -> tuple[list[Box], list[Box]]:
    """Return (the intersections of disjoint ``boxes`` with ``hole``, what is left of them)."""
    inside: list[Box] = []
    left: list[Box] = []
    for box in boxes:
        common = overlap(*box, *hole)
        if common is None:
            left.append(box)
        else:
            inside.append(common)
            left.extend(difference(box, common))
    return inside, left


def cut(box: Box, volume: int) -> Iterator[Box]:
    """Cut a slice into slices of at most ``volume`` elements, along its first dimensions."""
    offsets, sizes = box
    if math.prod(sizes) <= volume:
        yield box
        return
    dim = next(index for index, size in enumerate(sizes) if size > 1)
    # As many rows as fit; if not even one does, single rows, which are cut along the next dimension.
    step = max(1, volume // math.prod(sizes[dim + 1 :]))
    for start in range(0, sizes[dim], step):
        part = min(step, sizes[dim] - start)
        yield from cut(
            (
                (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                (*sizes[:dim], part, *sizes[dim + 1 :]),
            ),
            volume,
        )
