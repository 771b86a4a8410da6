"""torch's reader of checkpoints, which reads every chunk in the files once, however many parts of it are wanted.

torch's own reads a chunk again for every part: an engine that wants each expert by itself would read all experts of another
engine's chunk as often as there are experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future


class Reader(dcp.FileSystemReader):
    """Beside the tensors that are read into, one chunk is in memory at a time."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[Any, list[ReadItem]] = {}
        others = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                others.append(item)
            else:
                where = self.storage_data[item.storage_index]
                by_chunk.setdefault((where.relative_path, where.offset), []).append(item)
        for _, items in sorted(by_chunk.items(), key=lambda entry: entry[0]):
            where: Any = self.storage_data[items[0].storage_index]
            with self.fs.create_stream(self.fs.concat_path(self.path, where.relative_path), "rb") as stream:
                chunk = torch.load(self._slice_file(stream, where), map_location="cpu", weights_only=True)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        return super().read_data(LoadPlan(others, plan.storage_data, plan.planner_data), planner)
