"""Map a Megatron checkpoint's tensors to slices of Hugging Face weights, by which engines without Megatron read them.

mcore-bridge has this map only as a conversion of complete tensors. Its export is run once, on a copy, with row numbers in place
of parameters: the result under a weight's name lists the tensors and rows that it consists of. A matrix is represented by its
rows, so the numbers are few; each rank converts its own, and infers the shards of its tensor parallel peers, without
communication.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor

from megascend.engines.megatron.state import Entry, tensors_of
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.exported import fused_part
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.training.checkpoint.hf_slices import HfSlice, check_sizes

_NUMBERS = 2**40
"""An element is index of the :class:`_Rows` * _NUMBERS + row number."""


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a checkpoint tensor in a parameter of this rank.

    Attributes:
        key, shape: key and shape of the global tensor.
        lead: offsets along its first dimensions, those of layers and experts.
        first, count: first row and number of rows, along the dimension after these.
        divided: the other tensor parallel ranks have other rows of the tensor.
    """

    key: str
    shape: tuple[int, ...]
    lead: tuple[int, ...]
    first: int
    count: int
    divided: bool


def hf_slices(
    chunks: Sequence[Any], bridge: Any, entries: Sequence[Entry], headers: Mapping[str, TensorHeader]
) -> dict[str, list[HfSlice]]:
    """Return the slices of this rank's tensors, and of those of its tensor parallel peers. Local.

    Args:
        chunks: the model chunks of this rank, without wrappers.
        entries: Megatron-Core's checkpoint entries of them.
        headers: headers of the Hugging Face checkpoint's tensors.
    """
    probe = _Probe(bridge, entries)
    slices: dict[str, list[HfSlice]] = {}
    for chunk in chunks:
        try:
            weights = list(probe.weights(chunk))
        # Conversions are written for weights; with row numbers in their place anything may fail.
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError) as error:
            raise CheckpointError(
                f"mcore-bridge's conversion of this architecture is not supported here ({error})"
            ) from error
        for name, numbers in weights:
            fused = fused_part(name, headers)
            weight = name if fused is None else fused.fused_name
            if weight not in headers:
                raise CheckpointError(f"{weight} is not in Hugging Face's checkpoint")
            expert = () if fused is None or fused.expert is None else (fused.expert,)
            rows, *columns = headers[weight].shape[len(expert) :]
            start = first_expert = 0
            if fused is None and len(columns) == 2 and len(numbers) * bridge.ep_size == rows > len(numbers):
                # Fused experts, of which this rank has its own.
                rows, first_expert = len(numbers), bridge.ep_rank * len(numbers)
            if fused is not None and fused.half is not None:
                rows //= 2
                start = rows if fused.half == "up" else 0
            for key, hf_slice in _slices(weight, (rows, *columns), start, numbers, probe.rows):
                first, *rest = hf_slice.weight_offsets
                hf_slice = replace(hf_slice, weight_offsets=(*expert, first_expert + first, *rest))
                slices.setdefault(key, []).append(hf_slice)
    check_sizes(slices, {rows.key: rows.shape for rows in probe.rows})
    return slices


class _Probe:
    """Export of row numbers by a copy of the bridge, without communication; the original is not changed.

    Attributes:
        rows: the runs of rows, by index.
    """

    def __init__(self, bridge: Any, entries: Sequence[Entry]) -> None:
        self.rows: list[_Rows] = []
        self._numbers: dict[tuple[int, int], Tensor] = {}
        for entry in entries:
            if not isinstance(entry, ShardedObject) and isinstance(entry.data, Tensor) and entry.data.numel():
                self._numbers[_memory_key(entry.data)] = self._number(entry)
        self._class = type(bridge)
        self._view = view = copy.copy(bridge)
        # Matrices have one column here. mcore-bridge sets its configuration from the model's; the property prevents that.
        narrow = copy.copy(bridge.config)
        narrow.hidden_size = 1
        fixed = property(lambda view: narrow, lambda view, value: None)
        view.__class__ = type(self._class.__name__, (self._class,), {"config": fixed})
        # As if this rank were the only pipeline stage: nothing is communicated.
        view.pp_size = view.ep_pp_size = 1
        view._get_weight = self._get_weight
        view._set_module = self._set_module
        view._all_gather_tp = self._all_gather_tp
        view._broadcast_ep_pp = lambda tensor, is_expert: tensor
        view._convert_mtp_embeds = lambda *args: (
            None
        )  # the head for multi-token prediction has no such weights of its own

    def weights(self, chunk: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names and numbers of the weights that consist of this rank's parameters."""
        options = {"converter": lambda name, tensor: (name, tensor), "disable_tqdm": True, "_is_saving": True}
        for name, numbers in self._view.export_weights([chunk], **options):
            if numbers is not None:
                yield name, numbers

    def _number(self, entry: Any) -> Tensor:
        """Return the numbers of a parameter's rows, [rows, 1, ...], or of a vector's elements."""
        data: Tensor = entry.data
        # -1: rows that no tensor of the entry covers.
        numbers = torch.full(data.shape[:1], -1, dtype=torch.int64)
        inner = math.prod(data.shape[1:])
        tensors = tensors_of(entry)
        parts = Counter(tensor.key for tensor in tensors)
        for tensor in tensors:
            values: Any = tensor.data
            dims = tensor.prepend_axis_num
            start = (values.storage_offset() - data.storage_offset()) // inner
            count = values.shape[0] if values.dim() else 1
            numbers[start : start + count] = (
                len(self.rows) * _NUMBERS + tensor.global_offset[dims] + torch.arange(count)
            )
            self.rows.append(
                _Rows(
                    tensor.key,
                    tuple(tensor.global_shape),
                    tuple(tensor.global_offset[:dims]),
                    tensor.global_offset[dims],
                    count,
                    _fragments(tensor) > parts[tensor.key],
                )
            )
        return numbers.view(-1, *(1 for _ in data.shape[1:]))

    # --- replacements of mcore-bridge's methods of these names ---

    def _get_weight(self, weight: Any, *args: Any, **options: Any) -> tuple[Tensor | None, None]:
        if weight is None:  # of another pipeline stage, or an expert of another rank
            return None, None
        is_fused = isinstance(weight, list | tuple)
        numbers = [self._numbers[_memory_key(part)] for part in (weight if is_fused else [weight])]
        converted, _ = self._class._get_weight(self._view, numbers if is_fused else numbers[0], *args, **options)
        return converted, None

    def _set_module(self, module: Any, state: Any, prefix: str, to_mcore: bool) -> dict[str, Tensor]:
        if module is None:  # of another pipeline stage
            return {}
        return {f"{prefix}{name}": self._numbers[_memory_key(tensor)] for name, tensor in module.state_dict().items()}

    def _all_gather_tp(self, numbers: Tensor, dim: int | None, is_expert: bool) -> Tensor:
        size, rank = (
            (self._view.etp_size, self._view.etp_rank) if is_expert else (self._view.tp_size, self._view.tp_rank)
        )
        if dim is None or size == 1:
            return numbers
        runs = [self.rows[index] for index in (numbers // _NUMBERS).unique().tolist()]
        if not runs[0].divided:  # ranks have other columns of the same rows
            return numbers
        if not all(rows.divided for rows in runs):
            raise ValueError(f"{runs[0].key} is divided in part")
        # Runs of one parameter may differ in length (state spaces); a peer's is as long as this rank's.
        counts = torch.tensor([rows.count for rows in self.rows])[numbers // _NUMBERS]
        return torch.cat([numbers + (peer - rank) * counts for peer in range(size)], dim)


def _memory_key(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _fragments(tensor: ShardedTensor) -> int:
    """Return the number of runs into which all ranks divide the rows of a tensor."""
    fragments = tensor.axis_fragmentations
    return 1 if fragments is None else fragments[tensor.prepend_axis_num]


def _slices(
    weight: str, shape: tuple[int, ...], first_row: int, numbers: Tensor, runs: Sequence[_Rows]
) -> Iterator[tuple[str, HfSlice]]:
    """Yield the runs of rows that a weight consists of.

    Args:
        shape: shape of the weight, or of the half of it that ``numbers`` represents.
        first_row: first row of that half.
        numbers: with the weight's dimensions except the last; a vector's has its own. A padded vocabulary may be longer.
    """
    dims = shape if len(shape) == 1 else shape[:-1]
    actual = tuple(numbers.shape) if len(shape) == 1 else tuple(numbers.shape[:-1])
    if math.prod(dims[1:]) >= math.prod(actual[1:]) == 1:  # a convolution: numbers of its first dimension
        dims, actual = shape[:1], actual[:1]
    if actual[1:] != dims[1:] or actual[0] < dims[0] or numbers.numel() != math.prod(actual):
        raise CheckpointError(
            f"{weight} of shape {list(shape)} does not consist of complete rows, but of shape {list(numbers.shape)}"
        )
    flat = numbers[: dims[0]].reshape(-1)
    breaks = (flat.diff() != 1).nonzero().flatten() + 1
    borders = torch.arange(dims[-1], flat.numel(), dims[-1])  # a run does not cross the border between two matrices
    starts = sorted({0, *breaks.tolist(), *borders.tolist()})
    for start, stop in zip(starts, [*starts[1:], flat.numel()], strict=True):
        number = int(flat[start])
        index, row = number // _NUMBERS, number % _NUMBERS
        if not 0 <= index < len(runs):
            raise CheckpointError(f"{weight} is computed from parameters, not cut out of them")
        rows = runs[index]
        columns = rows.shape[len(rows.lead) + 1 :]
        if len(columns) != len(shape[len(dims) :]) or math.prod(columns) != math.prod(shape[len(dims) :]):
            raise CheckpointError(
                f"{weight} has rows of {list(shape[len(dims) :])} numbers, {rows.key} of {list(columns)}"
            )
        offsets, rest = [], start
        for size in reversed(dims):
            offsets.append(rest % size)
            rest //= size
        offsets = offsets[::-1]
        if len(dims) == 1:
            offsets[0] += first_row
        yield (
            rows.key,
            HfSlice(
                (*rows.lead, row, *(0 for _ in columns)),
                (*(1 for _ in rows.lead), stop - start, *columns),
                weight,
                (*offsets, *(0 for _ in columns)),
            ),
        )
