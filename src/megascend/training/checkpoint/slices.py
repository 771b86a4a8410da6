"""Slices of tensors: a rank's parts of a global tensor, in the form that torch's distributed checkpoints expect.

A slice is a box: offsets and sizes along each dimension. Independent of engines; its arithmetic, which weight transfer shares, is
in :mod:`weightwire.slices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

OPTIMIZER_KEY = "optimizer.state.{state}.{key}"
"""Name of ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer`` or ``param`` (the fp32 original) of a tensor ``key``."""


@dataclass
class TensorSlices:
    """Slices of one tensor that a rank holds.

    Attributes:
        shape, dtype: shape and dtype of the global tensor.
        may_differ: the checkpoint's tensor may be longer or shorter than this one (a padded vocabulary).
        slices: (offsets in the global tensor, values), values with as many dimensions as the global tensor.
        replicas: indices of the slices that another rank writes to checkpoints.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    may_differ: bool = False
    slices: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)
    replicas: set[int] = field(default_factory=set)

    @classmethod
    def whole(cls, values: Tensor, *, replica: bool = False) -> TensorSlices:
        """Wrap a tensor that this rank holds completely."""
        slices = cls(tuple(values.shape), values.dtype)
        slices.add((0,) * values.dim(), values, replica=replica)
        return slices

    def add(self, offsets: Sequence[int], values: Tensor, *, replica: bool = False) -> None:
        """Add a slice. Two slices at the same offsets can be read; writing them fails when torch validates the plan."""
        if replica:
            self.replicas.add(len(self.slices))
        self.slices.append((tuple(offsets), values))

    def without_replicas(self) -> TensorSlices:
        """Return only the slices that this rank writes."""
        written = [entry for index, entry in enumerate(self.slices) if index not in self.replicas]
        return replace(self, slices=written, replicas=set())

    def at(self, index: MetadataIndex) -> Tensor:
        """Return the slice at ``index.offset``; if there are several, the one with the number in ``index``."""
        if index.index is not None and index.index < len(self.slices):
            offsets, values = self.slices[index.index]
            if torch.Size(offsets) == index.offset:
                return values
        for offsets, values in self.slices:
            if torch.Size(offsets) == index.offset:
                return values
        raise KeyError(f"{index.fqn} has no slice at {index.offset}")

    # Protocol by which torch's planners handle objects that are not tensors (planner_helpers.py).

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), values.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.shape),
                ),
            )
            for offsets, values in self.slices
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), values.shape) for offsets, values in self.slices]


@dataclass(frozen=True)
class ContiguousSlice:
    """A slice whose elements are consecutive in the flattened tensor.

    Attributes:
        offsets, sizes: along each dimension.
        start: index of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Index after its last element in the flattened tensor."""
        return self.start + math.prod(self.sizes)


def slices_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[ContiguousSlice]:
    """Cut elements ``[start, stop)`` of a flattened tensor of ``shape`` into slices, in order.

    A distributed optimizer gives every data parallel rank such a run, regardless of row boundaries; checkpoint formats only have
    slices. There are at most ``2 * len(shape) - 1``: the end of a row, complete rows, the start of a row, and so on in each
    dimension.
    """
    if start >= stop:
        return
    if not shape:
        yield ContiguousSlice((), (), 0)
        return
    row_size = math.prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size  # complete rows
    if first > last:  # inside one row
        yield from _slices_of_row(shape, last, start, stop)
        return
    yield from _slices_of_row(shape, first - 1, start, first * row_size)
    if first < last:
        rest = tuple(shape[1:])
        yield ContiguousSlice((first, *(0 for _ in rest)), (last - first, *rest), first * row_size)
    yield from _slices_of_row(shape, last, last * row_size, stop)


def _slices_of_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[ContiguousSlice]:
    begin = row * math.prod(shape[1:])
    for inner in slices_of_run(shape[1:], start - begin, stop - begin):
        yield ContiguousSlice((row, *inner.offsets), (1, *inner.sizes), begin + inner.start)
