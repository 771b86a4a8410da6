"""What a run consists of, as parts of whole tensors: parameters and optimizer state by their place in the model.

Names and places come from Megatron-Core (``sharded_state_dict``, as its own ``dist_checkpointing`` takes it), so that a
checkpoint fits every layout. Optimizer state is named like the ``fully_reshardable`` format of Megatron's distributed
optimizer; that format is made by gathering whole tensors on every save, while here each rank names its own run of numbers
as chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.chunks import OPTIMIZER_KEY, Chunks
from megascend.engines.megatron.optimizer import Optimizer
from megascend.engines.regions import chunks
from megascend.errors import CheckpointError

Entry = ShardedTensor | ShardedTensorFactory | ShardedObject


@dataclass(frozen=True)
class NamedRun:
    """A run of a parameter's local numbers that is one part of one tensor in the checkpoint.

    Attributes:
        start: first number of the flattened parameter.
        tensor: Megatron's description of the part; its data is a view of the parameter.
    """

    start: int
    tensor: ShardedTensor


def entries(chunks: Sequence[Any], groups: ProcessGroups) -> Iterator[Entry]:
    """What Megatron-Core would save of a rank's model chunks (not wrapped), by name and place."""
    metadata = {"dp_cp_group": groups.device_group("dp_cp")}
    for chunk in chunks:
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory | ShardedObject):
                yield entry


def model_state(entries: Sequence[Entry], *, everything: bool) -> dict[str, Any]:
    """Parameters and buffers of this rank, and the objects that layers keep, by their names in the checkpoint.

    Args:
        everything: also what another rank speaks for, as needed to load.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        if isinstance(entry, ShardedObject):
            if entry.data is not None and (everything or _is_main_replica(entry.replica_id)):
                found[entry.unique_key] = entry.data
            continue
        for tensor in tensors_of(entry):
            if everything or _is_main_replica(tensor.replica_id):
                shards = _shards(found, tensor.key, tensor, tensor.dtype)
                shards.add(tensor.global_offset, _with_leading(tensor.data, tensor))
    return found


def optimizer_state(entries: Sequence[Entry], optimizer: Optimizer, *, everything: bool) -> dict[str, Chunks]:
    """Adam's moments and, where parameters are of 16 bits, their float32 originals. Live tensors, not copies.

    Args:
        everything: also what another rank speaks for, as needed to load.
    """
    runs: dict[int, list[NamedRun]] = {}
    for entry in entries:
        if not isinstance(entry, ShardedObject) and isinstance(entry.data, torch.nn.Parameter):
            runs.setdefault(id(entry.data), []).extend(_runs(entry))
    found: dict[str, Chunks] = {}
    for own in optimizer.parameter_states():
        if id(own.parameter) not in runs:
            raise CheckpointError(
                f"a trained parameter of shape {tuple(own.parameter.shape)} has no name in the checkpoint"
            )
        for run in runs[id(own.parameter)]:
            # Each data parallel rank has its own run of a distributed optimizer's state: there are no copies over that axis.
            copies = run.tensor.replica_id
            if own.divided and isinstance(copies, tuple):
                copies = copies[:-1]
            if everything or _is_main_replica(copies):
                for name, values in own.tensors.items():
                    key = OPTIMIZER_KEY.format(state=name, key=run.tensor.key)
                    _add_run(_shards(found, key, run.tensor, values.dtype), run, own.start, values)
    return found


def tensors_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """What an entry consists of: a factory divides a fused parameter (gate and up, for one)."""
    return [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))


def _runs(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[NamedRun]:
    parameter: Any = entry.data
    for tensor in tensors_of(entry):
        values: Any = tensor.data
        start = values.storage_offset() - parameter.storage_offset()
        same = values.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if not (same and values.is_contiguous() and 0 <= start <= parameter.numel() - values.numel()):
            raise CheckpointError(
                f"{tensor.key}: Megatron divides this parameter in a way that megascend's checkpoints do not know; please report "
                "the model's architecture"
            )
        yield NamedRun(start, tensor)


def _add_run(shards: Chunks, run: NamedRun, start: int, values: Tensor) -> None:
    """Add what ``values``, a flat run of a parameter that begins at ``start``, has of a run."""
    data: Any = run.tensor.data
    low, high = max(start, run.start), min(start + values.numel(), run.start + data.numel())
    leading = run.tensor.prepend_axis_num
    flat = values.view(-1)
    for chunk in chunks(data.shape, low - run.start, high - run.start):
        begin = chunk.start + run.start - start
        part = flat[begin : begin + chunk.stop - chunk.start].view((1,) * leading + chunk.sizes)
        local = (0,) * leading + chunk.offsets
        shards.add([a + b for a, b in zip(run.tensor.global_offset, local, strict=True)], part)


def _shards(found: dict[str, Any], key: str, tensor: ShardedTensor, dtype: torch.dtype) -> Chunks:
    return found.setdefault(key, Chunks(tuple(tensor.global_shape), dtype, tensor.allow_shape_mismatch))


def _with_leading(data: Any, tensor: ShardedTensor) -> Tensor:
    return data.detach().view((1,) * tensor.prepend_axis_num + tuple(data.shape))


def _is_main_replica(replica: int | tuple[int, ...]) -> bool:
    """True for the one of several copies that is written."""
    return not any(replica) if isinstance(replica, tuple) else replica == 0
