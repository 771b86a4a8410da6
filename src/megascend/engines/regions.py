"""Boxes of tensors. Pure arithmetic.

A distributed optimizer gives every data parallel rank a run of a parameter's numbers, wherever rows begin and end. Checkpoint
formats know chunks only; any run is a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """A chunk of a contiguous tensor.

    Attributes:
        offsets, sizes: along each dimension.
        start: where it begins, counted in elements of the flattened tensor. A chunk's elements follow one another there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Where it ends in the flattened tensor."""
        return self.start + math.prod(self.sizes)


def chunks(shape: Sequence[int], start: int, stop: int) -> Iterator[Chunk]:
    """The chunks that elements ``[start, stop)`` of a flattened tensor of ``shape`` consist of, in their order.

    At most ``2 * len(shape) - 1`` of them: the last part of a row, whole rows, the first part of a row, and so on in each
    dimension.
    """
    if start >= stop:
        return
    if not shape:
        yield Chunk((), (), 0)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # inside one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * inner)
    if first < last:
        rest = tuple(shape[1:])
        yield Chunk((first, *(0 for _ in rest)), (last - first, *rest), first * inner)
    yield from _inside(shape, last, last * inner, stop)


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Chunk]:
    begin = row * math.prod(shape[1:])
    for chunk in chunks(shape[1:], start - begin, stop - begin):
        yield Chunk((row, *chunk.offsets), (1, *chunk.sizes), begin + chunk.start)
