"""Checkpoint state of a Megatron model and its optimizer: slices of global tensors, independent of the layout.

Names and offsets come from Megatron-Core's ``sharded_state_dict``, which its ``dist_checkpointing`` uses too, so that a
checkpoint fits every layout. Optimizer state is named like the ``fully_reshardable`` format of Megatron's distributed optimizer;
that format gathers complete tensors on every save, while here each rank describes its own run of numbers as slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megascend.engines.common.weight_settings import MainParameter
from megascend.engines.megatron.optimizer import MegatronOptimizer
from megascend.errors import CheckpointError
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.checkpoint.hf_slices import HfSlices, held_weights
from megascend.training.checkpoint.slices import OPTIMIZER_KEY, TensorSlices, slices_of_run
from weightwire.slices import plus

Entry = ShardedTensor | ShardedTensorFactory | ShardedObject


@dataclass(frozen=True)
class NamedRun:
    """Run of a flattened local parameter that is one slice of one tensor in the checkpoint.

    Attributes:
        start: index of its first number in the flattened parameter.
        tensor: Megatron's description of the slice; its data is a view of the parameter.
    """

    start: int
    tensor: ShardedTensor


def entries(chunks: Sequence[Any], groups: ProcessGroups) -> Iterator[Entry]:
    """Yield Megatron-Core's checkpoint entries of a rank's model chunks (not wrapped)."""
    # Megatron's Transformer Engine layers number their replicas within this group.
    metadata = {"dp_cp_group": groups.device_group("dp_cp")}
    for chunk in chunks:
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory | ShardedObject):
                yield entry


def layer_objects(entries: Sequence[Entry], *, loading: bool) -> dict[str, Any]:
    """Return the layers' objects by name in the checkpoint, without those that another rank writes unless ``loading``."""
    return {
        entry.unique_key: entry.data
        for entry in entries
        if isinstance(entry, ShardedObject)
        and entry.data is not None
        and (loading or _is_main_replica(entry.replica_id))
    }


class Weights:
    """Slices of the model's parameters and buffers on this rank, replicas included: live tensors.

    Described again only if a tensor has moved: Megatron takes tenths of a second for a thousand experts.
    """

    def __init__(self, chunks: Sequence[Any], groups: ProcessGroups) -> None:
        self._chunks, self._groups = chunks, groups
        self._places: list[tuple[Any, ...]] = []
        self._slices: dict[str, TensorSlices] = {}

    def slices(self) -> dict[str, TensorSlices]:
        """Return the slices by name; the same object while nothing has moved."""
        live = [tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in live]
        if self._slices and places == self._places:
            return self._slices
        storages = {tensor.untyped_storage().data_ptr() for tensor in live}
        slices: dict[str, TensorSlices] = {}
        for entry in entries(self._chunks, self._groups):
            for tensor in () if isinstance(entry, ShardedObject) else tensors_of(entry):
                values = _with_leading(tensor.data, tensor)
                # It would keep its numbers while the model trains, and a load would fill it in vain.
                if values.untyped_storage().data_ptr() not in storages:
                    raise CheckpointError(
                        f"{tensor.key}: Megatron describes a copy of it; please report the architecture"
                    )
                replica = not _is_main_replica(tensor.replica_id)
                _slices(slices, tensor.key, tensor, tensor.dtype).add(tensor.global_offset, values, replica=replica)
        self._slices, self._places = slices, places
        return slices


def optimizer_state(
    entries: Sequence[Entry], optimizer: MegatronOptimizer, *, loading: bool
) -> dict[str, TensorSlices]:
    """Return Adam's moments, Muon's momentum and, for 16-bit parameters, the float32 main parameters.

    Live tensors, but for 8-bit moments, whose fp32 copies :meth:`MegatronOptimizer.restore` takes.
    """
    tensors: dict[str, TensorSlices] = {}
    runs = _runs_by_parameter(entries)
    for state in optimizer.parameter_states(loading=loading):
        for run in _runs_of(state.parameter, runs):
            # The state of a distributed optimizer is sharded over data parallel ranks: it has no replicas along that axis,
            # the last one of the id.
            replica_id = run.tensor.replica_id
            if state.divided and isinstance(replica_id, tuple):
                replica_id = replica_id[:-1]
            replica = not _is_main_replica(replica_id)
            for name, values in state.tensors.items():
                key = OPTIMIZER_KEY.format(state=name, key=run.tensor.key)
                _add_run(_slices(tensors, key, run.tensor, values.dtype), run, state.start, values, replica=replica)
    return tensors


def main_parameters(entries: Sequence[Entry], optimizer: MegatronOptimizer, slices: HfSlices) -> list[MainParameter]:
    """Return this rank's main parameters with the Hugging Face weights that they consist of.

    Args:
        slices: the model's, of all ranks.
    """
    runs = _runs_by_parameter(entries)
    parameters = []
    for parameter, start, main in optimizer.mains():
        tensors: dict[str, TensorSlices] = {}
        for run in _runs_of(parameter, runs):
            _add_run(_slices(tensors, run.tensor.key, run.tensor, main.dtype), run, start, main.detach())
        parameters.append(MainParameter(main, list(held_weights(tensors, slices))))
    return parameters


def tensors_of(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors of an entry: a factory splits a fused parameter (such as gate and up)."""
    return [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))


def _runs_by_parameter(entries: Sequence[Entry]) -> dict[int, list[NamedRun]]:
    runs: dict[int, list[NamedRun]] = {}
    for entry in entries:
        if not isinstance(entry, ShardedObject) and isinstance(entry.data, torch.nn.Parameter):
            # By identity: Adam's state knows parameters, not names.
            runs.setdefault(id(entry.data), []).extend(_runs(entry))
    return runs


def _runs_of(parameter: torch.nn.Parameter, runs: Mapping[int, list[NamedRun]]) -> list[NamedRun]:
    if id(parameter) not in runs:
        raise CheckpointError(f"a trained parameter of shape {tuple(parameter.shape)} has no name in the checkpoint")
    return runs[id(parameter)]


def _runs(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[NamedRun]:
    parameter: Any = entry.data
    for tensor in tensors_of(entry):
        values: Any = tensor.data
        # Optimizer state is indexed like the flattened parameter: find the view's start in it.
        start = values.storage_offset() - parameter.storage_offset()
        same = values.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if not (same and values.is_contiguous() and 0 <= start <= parameter.numel() - values.numel()):
            raise CheckpointError(
                f"{tensor.key}: Megatron divides this parameter in a way that megascend's checkpoints do not know; please report "
                "the model's architecture"
            )
        yield NamedRun(start, tensor)


def _add_run(slices: TensorSlices, run: NamedRun, start: int, values: Tensor, *, replica: bool = False) -> None:
    """Add the slices of a run that are in ``values``, a flat run of a parameter that starts at ``start``."""
    data: Any = run.tensor.data
    # The distributed optimizer cuts the flat buffer anywhere, also in the middle of a row: a run becomes several slices.
    low, high = max(start, run.start), min(start + values.numel(), run.start + data.numel())
    leading = run.tensor.prepend_axis_num
    flat = values.view(-1)
    for piece in slices_of_run(data.shape, low - run.start, high - run.start):
        begin = piece.start + run.start - start
        part = flat[begin : begin + piece.stop - piece.start].view((1,) * leading + piece.sizes)
        slices.add(plus(run.tensor.global_offset, (0,) * leading + piece.offsets), part, replica=replica)


def _slices(tensors: dict[str, Any], key: str, tensor: ShardedTensor, dtype: torch.dtype) -> TensorSlices:
    return tensors.setdefault(key, TensorSlices(tuple(tensor.global_shape), dtype, tensor.allow_shape_mismatch))


def _with_leading(data: Any, tensor: ShardedTensor) -> Tensor:
    # Megatron counts layers and experts as leading dimensions of the global tensor.
    return data.detach().view((1,) * tensor.prepend_axis_num + tuple(data.shape))


def _is_main_replica(replica: int | tuple[int, ...]) -> bool:
    """Check whether this is the replica that is written."""
    # Megatron numbers replicas along each axis; the first one along all of them writes.
    return not any(replica) if isinstance(replica, tuple) else replica == 0
