"""Chunks of tensors that are spread over ranks, as torch's distributed checkpoints take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

OPTIMIZER_KEY = "optimizer.state.{state}.{key}"
"""Name of ``exp_avg``, ``exp_avg_sq`` or ``param`` (the fp32 original) of a tensor ``key``."""


@dataclass
class Chunks:
    """This rank's parts of one tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of the whole tensor.
        may_differ: the checkpoint's tensor may be longer or shorter than this one (a padded vocabulary).
        parts: (offsets in the whole tensor, values) with as many dimensions as the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    may_differ: bool = False
    parts: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)

    def add(self, offsets: Sequence[int], values: Tensor) -> None:
        """Add a part. Two of the same place can be read, and are found when a plan to write them is checked."""
        self.parts.append((tuple(offsets), values))

    def part(self, index: MetadataIndex) -> Tensor:
        """The part at ``index.offset``; of several there, the one that ``index`` names by its number.

        Raises:
            KeyError: there is none.
        """
        if index.index is not None and index.index < len(self.parts):
            offsets, values = self.parts[index.index]
            if torch.Size(offsets) == index.offset:
                return values
        for offsets, values in self.parts:
            if torch.Size(offsets) == index.offset:
                return values
        raise KeyError(f"{index.fqn} has no part at {index.offset}")

    # What torch's planners ask of an object that is no tensor (planner_helpers.py).

    def __create_write_items__(self, name: str, of: object) -> list[WriteItem]:
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
            for offsets, values in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), values.shape) for offsets, values in self.parts]
