"""Slices of Hugging Face's weights that a Megatron checkpoint's tensors consist of, for engines that know nothing of Megatron.

mcore-bridge knows it as a conversion of whole tensors. It is asked once, on a copy, with row numbers in place of parameters:
what comes out under a weight's name says which rows of which tensor that weight is. A matrix stands for its rows, so the numbers
are few; each rank asks for what it has, and shards of other tensor parallel ranks follow from its own, so nothing is sent.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor

from megascend.checkpoint.hf_slices import HfSlice, check_sizes
from megascend.engines.megatron.state import Entry, tensors_of
from megascend.errors import CheckpointError
from megascend.huggingface.exported import fused_part
from megascend.huggingface.files import TensorHeader

_NUMBERS = 2**40
"""Row numbers are below it; what comes above is the number of the :class:`_Rows`."""


@dataclass(frozen=True)
class _Rows:
    """Rows of a tensor of the checkpoint that lie one after the other in a parameter of this rank.

    Attributes:
        key, shape: of the whole tensor.
        lead: offsets along its first dimensions, those of layers and experts.
        first, count: of the rows, along the dimension after these.
        divided: tensor parallel ranks have other rows of the tensor.
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
        entries: what Megatron-Core would save of them.
        headers: of Hugging Face's checkpoint.

    Raises:
        CheckpointError: the architecture is converted by more than cutting and joining rows.
    """
    probe = _Probe(bridge, entries)
    slices: dict[str, list[HfSlice]] = {}
    for chunk in chunks:
        try:
            weights = list(probe.weights(chunk))
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError) as error:
            raise CheckpointError(f"mcore-bridge converts this architecture in a way of its own ({error})") from error
        for name, numbers in weights:
            fused = fused_part(name, headers)
            weight = name if fused is None else fused.whole
            if weight not in headers:
                raise CheckpointError(f"{weight} is not in Hugging Face's checkpoint")
            expert = () if fused is None or fused.expert is None else (fused.expert,)
            rows, *columns = headers[weight].shape[len(expert) :]
            start = 0
            if fused is not None and fused.half is not None:
                rows //= 2
                start = rows if fused.half == "up" else 0
            for key, each in _slices(weight, (rows, *columns), start, numbers, probe.rows):
                inside = replace(each, weight_offsets=(*expert, *each.weight_offsets))
                slices.setdefault(key, []).append(inside)
    check_sizes(slices, {rows.key: rows.shape for rows in probe.rows})
    return slices


class _Probe:
    """mcore-bridge's export of row numbers, without communication; the original stays as it is.

    Attributes:
        rows: what numbers above ``_NUMBERS`` stand for.
    """

    def __init__(self, bridge: Any, entries: Sequence[Entry]) -> None:
        self.rows: list[_Rows] = []
        self._numbers: dict[tuple[int, int], Tensor] = {}
        for entry in entries:
            if not isinstance(entry, ShardedObject) and isinstance(entry.data, Tensor) and entry.data.numel():
                self._numbers[_place(entry.data)] = self._number(entry)
        self._class = type(bridge)
        self._view = view = copy.copy(bridge)
        # A matrix has one column here. mcore-bridge takes the configuration from the model when it begins.
        narrow = copy.copy(bridge.config)
        narrow.hidden_size = 1
        fixed = property(lambda view: narrow, lambda view, value: None)
        view.__class__ = type(self._class.__name__, (self._class,), {"config": fixed})
        view.pp_size = view.ep_pp_size = 1
        view._get_weight = self._get_weight
        view._all_gather_tp = self._all_gather_tp
        view._broadcast_ep_pp = lambda tensor, is_expert: tensor

    def weights(self, chunk: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names and numbers of the weights made of this rank's parameters."""
        options = {"converter": lambda name, tensor: (name, tensor), "disable_tqdm": True, "_is_saving": True}
        for name, numbers in self._view.export_weights([chunk], **options):
            if numbers is not None:
                yield name, numbers

    def _number(self, entry: Any) -> Tensor:
        """Return the numbers of a parameter's rows, [rows, 1, ...]; a vector stands for itself."""
        data: Tensor = entry.data
        numbers = torch.full(data.shape[:1], -1, dtype=torch.int64)
        inner = math.prod(data.shape[1:])
        tensors = tensors_of(entry)
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
                    _fragments(tensor) > len(tensors),
                )
            )
        return numbers.view(-1, *(1 for _ in data.shape[1:]))

    # --- in place of mcore-bridge's methods of these names ---

    def _get_weight(self, weight: Any, *args: Any, **options: Any) -> tuple[Tensor | None, None]:
        if weight is None:  # of another stage, or another rank's expert
            return None, None
        several = isinstance(weight, list | tuple)
        numbers = [self._numbers[_place(part)] for part in (weight if several else [weight])]
        found, _ = self._class._get_weight(self._view, numbers if several else numbers[0], *args, **options)
        return found, None

    def _all_gather_tp(self, numbers: Tensor, dim: int | None, is_expert: bool) -> Tensor:
        size, rank = (
            (self._view.etp_size, self._view.etp_rank) if is_expert else (self._view.tp_size, self._view.tp_rank)
        )
        if dim is None or size == 1:
            return numbers
        of = [self.rows[index] for index in (numbers // _NUMBERS).unique().tolist()]
        if not of[0].divided:  # ranks have other columns of the same rows
            return numbers
        if len({rows.count for rows in of}) != 1 or not all(rows.divided for rows in of):
            raise ValueError(f"{of[0].key} is divided unevenly")
        return torch.cat([numbers + (peer - rank) * of[0].count for peer in range(size)], dim)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _fragments(tensor: ShardedTensor) -> int:
    """Return into how many runs the rows of a tensor are divided over all ranks."""
    fragments = tensor.axis_fragmentations
    return 1 if fragments is None else fragments[tensor.prepend_axis_num]


def _slices(
    weight: str, shape: tuple[int, ...], first_row: int, numbers: Tensor, known: Sequence[_Rows]
) -> Iterator[tuple[str, HfSlice]]:
    """Yield the runs of rows that a weight consists of.

    Args:
        shape: of the weight, or of the half of it that ``numbers`` are.
        first_row: of that half.
        numbers: its dimensions but the last are the weight's; a vector's is its own. A padded vocabulary may be longer.
    """
    dims = shape if len(shape) == 1 else shape[:-1]
    actual = tuple(numbers.shape) if len(shape) == 1 else tuple(numbers.shape[:-1])
    if actual[1:] != dims[1:] or actual[0] < dims[0] or numbers.numel() != math.prod(actual):
        raise CheckpointError(
            f"{weight} of shape {list(shape)} is not made of whole rows, but as {list(numbers.shape)}"
        )
    flat = numbers[: dims[0]].reshape(-1)
    breaks = (flat.diff() != 1).nonzero().flatten() + 1
    inside = torch.arange(dims[-1], flat.numel(), dims[-1])  # a run ends with the rows of one matrix
    starts = sorted({0, *breaks.tolist(), *inside.tolist()})
    for start, stop in zip(starts, [*starts[1:], flat.numel()], strict=True):
        number = int(flat[start])
        index, row = number // _NUMBERS, number % _NUMBERS
        if not 0 <= index < len(known):
            raise CheckpointError(f"{weight} is computed from parameters, not cut out of them")
        rows = known[index]
        columns = rows.shape[len(rows.lead) + 1 :]
        if len(columns) != len(shape[len(dims) :]) or math.prod(columns) != math.prod(shape[len(dims) :]):
            raise CheckpointError(
                f"{weight} has rows of {list(shape[len(dims) :])} numbers, {rows.key} of {list(columns)}"
            )
        place, rest = [], start
        for size in reversed(dims):
            place.append(rest % size)
            rest //= size
        place = place[::-1]
        if len(dims) == 1:
            place[0] += first_row
        yield (
            rows.key,
            HfSlice(
                (*rows.lead, row, *(0 for _ in columns)),
                (*(1 for _ in rows.lead), stop - start, *columns),
                weight,
                (*place, *(0 for _ in columns)),
            ),
        )
