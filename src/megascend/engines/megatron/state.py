"""A run's parameters and optimizer state as slices of whole tensors, named by their place in the model.

Names and places come from Megatron-Core (``sharded_state_dict``, as its own ``dist_checkpointing`` takes it), so that a
checkpoint fits every layout. Optimizer state is named like the ``fully_reshardable`` format of Megatron's distributed
optimizer; that format is made by gathering whole tensors on every save, while here each rank names its own run of numbers
as slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megascend.checkpoint.slices import OPTIMIZER_KEY, TensorSlices, plus, slices_of_run
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.megatron.optimizer import MegatronOptimizer
from megascend.errors import CheckpointError

Entry = ShardedTensor | ShardedTensorFactory | ShardedObject


@dataclass(frozen=True)
class NamedRun:
    """A run of a parameter's local numbers that is one slice of one tensor in the checkpoint.

    Attributes:
        start: first number of the flattened parameter.
        tensor: Megatron's description of the slice; its data is a view of the parameter.
    """

    start: int
    tensor: ShardedTensor


def entries(chunks: Sequence[Any], groups: ProcessGroups) -> Iterator[Entry]:
    """Yield what Megatron-Core would save of a rank's model chunks (not wrapped), by name and place."""
    metadata = {"dp_cp_group": groups.device_group("dp_cp")}
    for chunk in chunks:
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory | ShardedObject):
                yield entry


def model_state(entries: Sequence[Entry], *, everything: bool) -> dict[str, Any]:
    """Return parameters and buffers of this rank, and the objects that layers keep, by their names in the checkpoint.

    Args:
        everything: also what another rank writes, as needed to load.
    """
    values: dict[str, Any] = {}
    for entry in entries:
        if isinstance(entry, ShardedObject):
            if entry.data is not None and (everything or _is_main_replica(entry.replica_id)):
                values[entry.unique_key] = entry.data
            continue
        for tensor in tensors_of(entry):
            if everything or _is_main_replica(tensor.replica_id):
                slices = _slices(values, tensor.key, tensor, tensor.dtype)
                slices.add(tensor.global_offset, _with_leading(tensor.data, tensor))
    return values


def optimizer_state(
    entries: Sequence[Entry], optimizer: MegatronOptimizer, *, everything: bool
) -> dict[str, TensorSlices]:
    """Return Adam's moments and, where parameters are of 16 bits, their float32 originals. Live tensors, not copies.

    Args:
        everything: also what another rank writes, as needed to load.
    """
    runs: dict[int, list[NamedRun]] = {}
    for entry in entries:
        if not isinstance(entry, ShardedObject) and isinstance(entry.data, torch.nn.Parameter):
            runs.setdefault(id(entry.data), []).extend(_runs(entry))
    tensors: dict[str, TensorSlices] = {}
    for kept in optimizer.parameter_states():
        if id(kept.parameter) not in runs:
            raise CheckpointError(
                f"a trained parameter of shape {tuple(kept.parameter.shape)} has no name in the checkpoint"
            )
        for run in runs[id(kept.parameter)]:
            # Each data parallel rank has its own run of a distributed optimizer's state: there are no copies over that axis.
            copies = run.tensor.replica_id
            if kept.divided and isinstance(copies, tuple):
                copies = copies[:-1]
            if everything or _is_main_replica(copies):
                for name, values in kept.tensors.items():
                    key = OPTIMIZER_KEY.format(state=name, key=run.tensor.key)
                    _add_run(_slices(tensors, key, run.tensor, values.dtype), run, kept.start, values)
    return tensors


def tensors_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors of an entry: a factory divides a fused parameter (gate and up, for one)."""
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


def _add_run(slices: TensorSlices, run: NamedRun, start: int, values: Tensor) -> None:
    """Add the slices of a run that are in ``values``, a flat run of a parameter that begins at ``start``."""
    data: Any = run.tensor.data
    low, high = max(start, run.start), min(start + values.numel(), run.start + data.numel())
    leading = run.tensor.prepend_axis_num
    flat = values.view(-1)
    for each in slices_of_run(data.shape, low - run.start, high - run.start):
        begin = each.start + run.start - start
        part = flat[begin : begin + each.stop - each.start].view((1,) * leading + each.sizes)
        slices.add(plus(run.tensor.global_offset, (0,) * leading + each.offsets), part)


def _slices(tensors: dict[str, Any], key: str, tensor: ShardedTensor, dtype: torch.dtype) -> TensorSlices:
    return tensors.setdefault(key, TensorSlices(tuple(tensor.global_shape), dtype, tensor.allow_shape_mismatch))


def _with_leading(data: Any, tensor: ShardedTensor) -> Tensor:
    return data.detach().view((1,) * tensor.prepend_axis_num + tuple(data.shape))


def _is_main_replica(replica: int | tuple[int, ...]) -> bool:
    """Check whether this is the one of several copies that is written."""
    return not any(replica) if isinstance(replica, tuple) else replica == 0
