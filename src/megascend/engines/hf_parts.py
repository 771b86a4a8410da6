"""Which box of which tensor in a checkpoint is which box of which Hugging Face weight. Pure.

Every engine has names and layouts of its own: q, k and v in one tensor, experts stacked, a vocabulary that is padded. Hugging
Face's weights are what all of them know, so that a checkpoint which says what its tensors are in terms of these can be read by
an engine of another kind: for each tensor that it needs, which weights, and for these, which boxes of the checkpoint's tensors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megascend.engines.chunks import OPTIMIZER_KEY, Chunks
from megascend.errors import CheckpointError

_OF_OPTIMIZER = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|param)\.(.+)")


@dataclass(frozen=True)
class HfPart:
    """A box of a tensor that is a box of a Hugging Face weight.

    The last dimensions of both are the same; where one has more of them, the box is 1 long in its first ones.

    Attributes:
        offsets, sizes: of the box in the tensor.
        weight: its name in Hugging Face's checkpoint.
        weight_offsets: of the box in the weight.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    weight: str
    weight_offsets: tuple[int, ...]

    @property
    def weight_sizes(self) -> tuple[int, ...]:
        """Of the box in the weight."""
        return _with_dims(self.sizes, len(self.weight_offsets), 1)


HfParts = Mapping[str, Sequence[HfPart]]
"""By name of a tensor of the model: all that it consists of. Moments and fp32 originals are made like their parameters."""


@dataclass
class Translation:
    """What an engine reads from a checkpoint of another kind.

    Attributes:
        reads: by name of the checkpoint's tensors, parts that are views of the engine's own.
        padding: the engine's own tensors of which no weight has some rows; to be set to zero before reading.
        weights: all that are read.
    """

    reads: dict[str, Chunks] = field(default_factory=dict)
    padding: list[Tensor] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)


def translated(
    wanted: Mapping[str, object], mine: HfParts, theirs: HfParts, stored: Mapping[str, Chunks]
) -> Translation:
    """Where an engine's tensors are found in a checkpoint of another kind.

    An fp32 original is read from the checkpoint's, or, where parameters are fp32 themselves, from these; so is a parameter that
    is fp32 here.

    Args:
        wanted: the engine's state: :class:`Chunks`, and what other engines do not have.
        mine, theirs: what the tensors of engine and checkpoint are.
        stored: shapes and dtypes of the checkpoint's tensors, by name; without parts.

    Raises:
        CheckpointError: the checkpoint lacks something.
    """
    found = Translation()
    own = {name: _ByFirstOffset(parts) for name, parts in mine.items()}
    of_weight: dict[str, list[tuple[str, HfPart]]] = defaultdict(list)
    for name, parts in theirs.items():
        for part in parts:
            of_weight[part.weight].append((name, part))
    for key, chunks in wanted.items():
        if not isinstance(chunks, Chunks):
            continue
        kind, name = _taken_apart(key)
        if name not in own:
            raise CheckpointError(f"nothing says which Hugging Face weight {name} is")
        kinds = _kinds(kind, chunks)
        for offsets, values in chunks.parts:
            read = 0
            for part in own[name].near(offsets, values.shape):
                for other, source, target in _common(part, offsets, values, of_weight[part.weight]):
                    stored_name = _first_stored(other, kinds, stored)
                    like = stored[stored_name]
                    found.reads.setdefault(stored_name, Chunks(like.shape, like.dtype)).add(source, target)
                    found.weights.add(part.weight)
                    read += target.numel()
            if read != values.numel():
                if not chunks.may_differ:
                    raise CheckpointError(f"of {key} it has {read} of the {values.numel()} numbers that are needed")
                found.padding.append(values)
    return found


def _taken_apart(key: str) -> tuple[str | None, str]:
    """(kind of optimizer state or None, name of the model's tensor)."""
    match = _OF_OPTIMIZER.fullmatch(key)
    return (match[1], match[2]) if match else (None, key)


def _kinds(kind: str | None, chunks: Chunks) -> Sequence[str | None]:
    """From which state of a parameter this one is read: the first that there is."""
    if kind == "param" or (kind is None and chunks.dtype.itemsize == 4):
        return ("param", None)
    return (kind,)


def _first_stored(name: str, kinds: Sequence[str | None], stored: Mapping[str, Chunks]) -> str:
    for kind in kinds:
        key = name if kind is None else OPTIMIZER_KEY.format(state=kind, key=name)
        if key in stored:
            return key
    raise CheckpointError(f"it has no {key}")


class _ByFirstOffset:
    """A tensor's parts. A tensor may hold all layers, with thousands of parts, of which a chunk needs those of its own."""

    def __init__(self, parts: Sequence[HfPart]) -> None:
        self._all = parts
        self._by_first: dict[int, list[HfPart]] | None = None
        if all(len(part.sizes) > 1 and part.sizes[0] == 1 for part in parts):
            self._by_first = defaultdict(list)
            for part in parts:
                self._by_first[part.offsets[0]].append(part)

    def near(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[HfPart]:
        """Parts that may have something in common with a box."""
        if self._by_first is None:
            yield from self._all
            return
        for first in range(offsets[0], offsets[0] + sizes[0]):
            yield from self._by_first.get(first, ())


def _common(
    part: HfPart, offsets: tuple[int, ...], values: Tensor, theirs: Sequence[tuple[str, HfPart]]
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """What a part, this rank's numbers from ``offsets`` on, and a checkpoint's parts of the same weight have in common.

    Yields:
        (the checkpoint's tensor, offsets in it, the place for it as a view of ``values``).
    """
    own = _overlap(part.offsets, part.sizes, offsets, tuple(values.shape))
    if own is None:
        return
    starts, sizes = own
    dims = len(part.weight_offsets)
    inside = _with_dims(_minus(starts, part.offsets), dims, 0)
    start = _plus(part.weight_offsets, inside)
    for name, other in theirs:
        both = _overlap(start, _with_dims(sizes, dims, 1), other.weight_offsets, other.weight_sizes)
        if both is None:
            continue
        first, shape = both
        in_other = _with_dims(_minus(first, other.weight_offsets), len(other.offsets), 0)
        in_values = _plus(_minus(starts, offsets), _with_dims(_minus(first, start), len(offsets), 0))
        own_shape = _with_dims(shape, len(offsets), 1)
        view = values[tuple(slice(a, a + n) for a, n in zip(in_values, own_shape, strict=True))]
        yield name, _plus(other.offsets, in_other), view.view(_with_dims(shape, len(other.offsets), 1))


def _overlap(
    a: Sequence[int], a_sizes: Sequence[int], b: Sequence[int], b_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, sizes) of what two boxes have in common, or None."""
    starts = tuple(max(x, y) for x, y in zip(a, b, strict=True))
    stops = (min(x + m, y + n) for x, m, y, n in zip(a, a_sizes, b, b_sizes, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _with_dims(values: Sequence[int], dims: int, fill: int) -> tuple[int, ...]:
    """The last ``dims`` of ``values``, with ``fill`` before them where they are fewer."""
    assert all(value == fill for value in values[: max(0, len(values) - dims)]), "boxes have the same last dimensions"
    return (fill,) * (dims - len(values)) + tuple(values[max(0, len(values) - dims) :])


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def check_sizes(parts: HfParts, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless every part lies within its tensor, and no two tensors' parts are more than it has."""
    for name, shape in shapes.items():
        inside = all(
            offset >= 0 and offset + size <= whole
            for part in parts.get(name, ())
            for offset, size, whole in zip(part.offsets, part.sizes, shape, strict=True)
        )
        if not inside or sum(math.prod(part.sizes) for part in parts.get(name, ())) > math.prod(shape):
            raise CheckpointError(f"{name} is not made of Hugging Face weights in a way that can be described")
