"""Map slices of a checkpoint's tensors to slices of Hugging Face weights; the map is stored as ``hf_parts.json``.

Every engine has its own names and layouts: q, k and v in one tensor, stacked experts, a padded vocabulary. All of them know
Hugging Face's weights, so with this map an engine of another kind can read the checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from megascend.config.documents import load_json
from megascend.errors import CheckpointError
from megascend.training.checkpoint.slices import OPTIMIZER_KEY, TensorSlices
from weightwire.slices import index_of, minus, overlap, plus

NAME = "hf_parts.json"
_OPTIMIZER_NAME = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|momentum_buffer|param)\.(.+)")


@dataclass(frozen=True)
class HfSlice:
    """A slice of a tensor that equals a slice of a Hugging Face weight.

    Both have the same last dimensions; if one has more dimensions, the slice has size 1 along its first ones.

    Attributes:
        offsets, sizes: position and extent of the slice in the tensor.
        weight: its name in Hugging Face's checkpoint.
        weight_offsets: position of the slice in the weight.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    weight: str
    weight_offsets: tuple[int, ...]

    @property
    def weight_sizes(self) -> tuple[int, ...]:
        """Return the sizes in the weight."""
        return _with_dims(self.sizes, len(self.weight_offsets), 1)


HfSlices = Mapping[str, Sequence[HfSlice]]
"""Slices that each tensor of the model consists of, by its name. Moments and fp32 originals have those of their parameter."""


@dataclass
class Translation:
    """Reads that fill an engine's tensors from a checkpoint of another kind.

    Attributes:
        reads: by name of the checkpoint's tensors, slices that are views of the engine's tensors.
        padding: the engine's tensors with rows that no weight fills; set them to zero before reading.
        weights: names of all weights that are read.
    """

    reads: dict[str, TensorSlices] = field(default_factory=dict)
    padding: list[Tensor] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)


def translate(
    state: Mapping[str, object], engine_slices: HfSlices, stored_slices: HfSlices, stored: Mapping[str, TensorSlices]
) -> Translation:
    """Plan how to read an engine's tensors from a checkpoint of an engine of another kind.

    fp32 originals, and parameters that are fp32 in the engine, are read from the checkpoint's fp32 originals; if it has none,
    its parameters are fp32 and are read instead.

    Args:
        state: the engine's state: :class:`TensorSlices`, and objects that other engines do not have.
        engine_slices, stored_slices: Hugging Face slices of the tensors of engine and checkpoint.
        stored: shapes and dtypes of the checkpoint's tensors, by name; without slices.
    """
    translation = Translation()
    by_tensor = {name: _ByLeadingOffsets(slices) for name, slices in engine_slices.items()}
    by_weight: dict[str, list[tuple[str, HfSlice]]] = defaultdict(list)
    for name, slices in stored_slices.items():
        for stored_slice in slices:
            by_weight[stored_slice.weight].append((name, stored_slice))
    for key, tensor in state.items():
        if not isinstance(tensor, TensorSlices):
            continue
        match = _OPTIMIZER_NAME.fullmatch(key)
        kind, name = (match[1], match[2]) if match else (None, key)
        if name not in by_tensor:
            raise CheckpointError(f"the engine does not map {name} to Hugging Face weights")
        # An fp32 original is more precise than a 16-bit parameter.
        fp32 = kind == "param" or (kind is None and tensor.dtype.itemsize == 4)
        kinds = ("param", None) if fp32 else (kind,)
        for offsets, values in tensor.slices:
            read = 0
            for hf_slice in by_tensor[name].near(offsets, values.shape):
                for other, source, target in _common(hf_slice, offsets, values, by_weight[hf_slice.weight]):
                    stored_name = _first_stored(other, kinds, stored)
                    like = stored[stored_name]
                    translation.reads.setdefault(stored_name, TensorSlices(like.shape, like.dtype)).add(source, target)
                    translation.weights.add(hf_slice.weight)
                    read += target.numel()
            if read != values.numel():
                if not tensor.may_differ:
                    raise CheckpointError(
                        f"it has only {read} of the {values.numel()} values of {key} that this rank needs"
                    )
                # Rows that pad a vocabulary to a multiple of the ranks: no token uses them, and other layouts have more or fewer.
                translation.padding.append(values)
    return translation


def held_weights(
    state: Mapping[str, TensorSlices], hf_slices: HfSlices
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield (name of a Hugging Face weight, offsets in it, values) of all slices that a rank holds.

    Values are views of the engine's tensors, with the weight's dimensions. Rows that only pad a vocabulary are left out.

    Args:
        state: the engine's tensors, without optimizer state.
        hf_slices: Hugging Face slices that they consist of.
    """
    for name, tensor in state.items():
        if name not in hf_slices:
            raise CheckpointError(f"the engine does not map {name} to Hugging Face weights")
        by_offset = _ByLeadingOffsets(hf_slices[name])
        for offsets, values in tensor.slices:
            for hf_slice in by_offset.near(offsets, values.shape):
                common = overlap(hf_slice.offsets, hf_slice.sizes, offsets, tuple(values.shape))
                if common is None:
                    continue
                starts, sizes = common
                dims = len(hf_slice.weight_offsets)
                in_weight = plus(hf_slice.weight_offsets, _with_dims(minus(starts, hf_slice.offsets), dims, 0))
                view = values[index_of(minus(starts, offsets), sizes)]
                yield hf_slice.weight, in_weight, view.view(_with_dims(sizes, dims, 1))


def _first_stored(name: str, kinds: Sequence[str | None], stored: Mapping[str, TensorSlices]) -> str:
    """Return the name of the first state of a parameter that the checkpoint has."""
    key = name
    for kind in kinds:
        key = name if kind is None else OPTIMIZER_KEY.format(state=kind, key=name)
        if key in stored:
            return key
    raise CheckpointError(f"it has no {key}")


class _ByLeadingOffsets:
    """Index of a tensor's slices by their offsets in the leading dimensions in which all of them have size 1.

    A tensor of all layers and experts may have tens of thousands of slices, of which a slice of a rank overlaps with one or two.
    """

    def __init__(self, slices: Sequence[HfSlice]) -> None:
        self._by_offsets: dict[tuple[int, ...], list[HfSlice]] = defaultdict(list)
        self._dims = 0
        if slices:
            dims = min(len(hf_slice.sizes) for hf_slice in slices) - 1
            while self._dims < dims and all(hf_slice.sizes[self._dims] == 1 for hf_slice in slices):
                self._dims += 1
        for hf_slice in slices:
            self._by_offsets[hf_slice.offsets[: self._dims]].append(hf_slice)

    def near(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[HfSlice]:
        """Yield all slices that may overlap with a slice."""
        ranges = [range(start, start + size) for start, size in zip(offsets, sizes, strict=True)][: self._dims]
        if math.prod(len(numbers) for numbers in ranges) > len(self._by_offsets):
            yield from itertools.chain.from_iterable(self._by_offsets.values())
            return
        for leading in itertools.product(*ranges):
            yield from self._by_offsets.get(leading, ())


def _common(
    hf_slice: HfSlice, offsets: tuple[int, ...], values: Tensor, stored: Sequence[tuple[str, HfSlice]]
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Intersect a slice of the engine's tensor, this rank's values at ``offsets``, and the checkpoint's slices of that weight.

    Yields:
        (the checkpoint's tensor, offsets in it, a view of ``values`` with the checkpoint's dimensions).
    """
    local = overlap(hf_slice.offsets, hf_slice.sizes, offsets, tuple(values.shape))
    if local is None:
        return
    starts, sizes = local
    dims = len(hf_slice.weight_offsets)
    start = plus(hf_slice.weight_offsets, _with_dims(minus(starts, hf_slice.offsets), dims, 0))
    for name, other in stored:
        common = overlap(start, _with_dims(sizes, dims, 1), other.weight_offsets, other.weight_sizes)
        if common is None:
            continue
        first, shape = common
        in_other = _with_dims(minus(first, other.weight_offsets), len(other.offsets), 0)
        in_values = plus(minus(starts, offsets), _with_dims(minus(first, start), len(offsets), 0))
        view = values[index_of(in_values, _with_dims(shape, len(offsets), 1))]
        yield name, plus(other.offsets, in_other), view.view(_with_dims(shape, len(other.offsets), 1))


def _with_dims(values: Sequence[int], dims: int, fill: int) -> tuple[int, ...]:
    """Return the last ``dims`` of ``values``, padded in front with ``fill`` if there are fewer."""
    assert all(value == fill for value in values[: max(0, len(values) - dims)]), "slices have the same last dimensions"
    return (fill,) * (dims - len(values)) + tuple(values[max(0, len(values) - dims) :])


def check_sizes(hf_slices: HfSlices, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless every slice lies within its tensor, and a tensor's slices are not larger than the tensor."""
    for name, shape in shapes.items():
        slices = hf_slices.get(name, ())
        inside = all(
            offset >= 0 and offset + size <= length
            for hf_slice in slices
            for offset, size, length in zip(hf_slice.offsets, hf_slice.sizes, shape, strict=True)
        )
        # Slices that cover more than the tensor overlap: a weight would be read into the same place twice.
        if not inside or sum(math.prod(hf_slice.sizes) for hf_slice in slices) > math.prod(shape):
            raise CheckpointError(f"{name} is not made of Hugging Face weights in a way that can be described")


def to_text(hf_slices: HfSlices | str) -> str:
    """Return the file's content, JSON: ``tensors``, or the ``problem`` that kept the engine from describing them."""
    if isinstance(hf_slices, str):
        # Engines of other kinds report it when they refuse the checkpoint.
        return json.dumps({"problem": hf_slices}) + "\n"
    rows = {
        name: [[hf_slice.weight, hf_slice.weight_offsets, hf_slice.offsets, hf_slice.sizes] for hf_slice in slices]
        for name, slices in hf_slices.items()
    }
    return json.dumps({"tensors": rows}, separators=(",", ":")) + "\n"


def read(directory: Path) -> HfSlices:
    """Read the file of a checkpoint."""
    try:
        values = load_json((directory / NAME).read_bytes())
        if "problem" in values:
            raise CheckpointError(values["problem"])
        return {
            name: [
                HfSlice(tuple(offsets), tuple(sizes), weight, tuple(weight_offsets))
                for weight, weight_offsets, offsets, sizes in rows
            ]
            for name, rows in values["tensors"].items()
        }
    except FileNotFoundError:
        raise CheckpointError(f"it has no {NAME}: it was written by a version of megascend without that file") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"its {NAME} cannot be read: {error}") from error
