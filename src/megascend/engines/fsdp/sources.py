"""Which tensors of a checkpoint each parameter of a model consists of, and where in it they lie.

transformers knows it as a conversion of whole tensors. It is asked once, layer by layer, with tensors of row numbers in place of
weights: what comes out under a checkpoint's name says which rows of which parameter that tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megascend.engines.fsdp.transformers_api import in_checkpoint
from megascend.engines.hf_parts import HfPart
from megascend.errors import CheckpointError
from megascend.huggingface.exported import LAYER, some
from megascend.huggingface.files import TensorHeader

_NUMBERS = 2**32
"""Row numbers are below it; what comes above is the parameter's number."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint, as a box of a parameter.

    Attributes:
        source: its name in the checkpoint; its shape is ``sizes``, or that without the 1 of a single expert.
        offsets, sizes: of the box, along each dimension of the parameter.
    """

    source: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def pieces(model: Any, headers: Mapping[str, TensorHeader]) -> dict[str, list[Piece]]:
    """What each parameter, and each buffer that checkpoints hold, is read from.

    Args:
        model: of transformers; may be without memory, not yet sharded.
        headers: of the checkpoint's tensors that the model has.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, has one that nothing here needs, or holds one in a way that is not known.
    """
    shapes = wanted_tensors(model)
    found: dict[str, list[Piece]] = {}
    for _, names in groupby(shapes, key=layer_of):
        found |= _pieces_of(model, {name: shapes[name] for name in names}, headers)
    used = {piece.source for parts in found.values() for piece in parts}
    left = sorted(name for name in headers if name not in used)
    if left:
        raise CheckpointError(
            f"model: {some(left)} in the checkpoint, and nothing in {type(model).__name__}, as config.json describes it, is read "
            "from there: correct config.json, or remove the tensors from the files"
        )
    for name, parts in found.items():
        covered = sum(math.prod(part.sizes) for part in parts)
        if covered != math.prod(shapes[name]):
            raise CheckpointError(f"model: {name} is not read whole: {covered} of {math.prod(shapes[name])} numbers")
    return found


def hf_parts(sources: Mapping[str, Sequence[Piece]], headers: Mapping[str, TensorHeader]) -> dict[str, list[HfPart]]:
    """What :func:`pieces` has found, as checkpoints say it: every piece is a whole weight."""
    return {
        name: [
            HfPart(piece.offsets, piece.sizes, piece.source, (0,) * len(headers[piece.source].shape)) for piece in parts
        ]
        for name, parts in sources.items()
    }


def wanted_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of all that checkpoints hold of a model, in its order, tied weights once."""
    persistent = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    return {name: tuple(t.shape) for name, t in persistent.items() if first.setdefault(id(t), name) == name}


def layer_of(name: str) -> str:
    """What tells a layer's tensors from others'."""
    found = LAYER.search(name)
    return found[0] if found else ""


def _pieces_of(
    model: Any, shapes: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]
) -> dict[str, list[Piece]]:
    names = list(shapes)
    rows, columns = (
        in_checkpoint(model, {name: _numbers(shapes[name], number, dim) for number, name in enumerate(names)}, headers)
        for dim in (0, 1)
    )
    found: dict[str, list[Piece]] = {name: [] for name in names}
    for source, values in rows.items():
        if source not in headers:
            raise CheckpointError(
                f"model: the checkpoint has no {source}, which {type(model).__name__}, as config.json describes it, needs: "
                "correct config.json, or fetch the files again"
            )
        name = names[int(values.flatten()[0]) // _NUMBERS]
        piece = _box(source, values % _NUMBERS, columns[source] % _NUMBERS, shapes[name])
        if tuple(size for size in piece.sizes if size > 1) != tuple(s for s in headers[source].shape if s > 1):
            raise CheckpointError(
                f"model: {source} has shape {list(headers[source].shape)} in the checkpoint, {list(piece.sizes)} is needed "
                f"for {name}"
            )
        found[name].append(piece)
    return found


def _numbers(shape: tuple[int, ...], parameter: int, dim: int) -> Tensor:
    """Of a parameter, at every place its number and the place along ``dim``; dimensions after the second are 1 long.

    A matrix stands for its rows alone: only fused experts are taken apart in two dimensions.
    """
    kept = 2 if len(shape) > 2 else 1
    short = [size if place < kept else 1 for place, size in enumerate(shape)]
    values = torch.full(short, parameter * _NUMBERS, dtype=torch.int64)
    if dim < kept and short:
        values += torch.arange(short[dim]).view([-1 if place == dim else 1 for place in range(len(short))])
    return values


def _box(source: str, rows: Tensor, columns: Tensor, shape: tuple[int, ...]) -> Piece:
    """Where in a parameter of ``shape`` the places lie that ``rows`` and ``columns`` tell.

    Raises:
        CheckpointError: they are not a box in order.
    """
    first = [int(rows.min()), int(columns.min())]
    sizes = [int(rows.max()) - first[0] + 1, int(columns.max()) - first[1] + 1]
    if len(shape) <= 2:  # a matrix's columns are all there
        first, sizes = first[:1], sizes[:1]
    first, sizes = first[: len(shape)], sizes[: len(shape)]
    expected = [torch.arange(start, start + size) for start, size in zip(first, sizes, strict=True)]
    in_order = math.prod(sizes) == rows.numel()
    for dim, values in enumerate((rows, columns)[: len(sizes)]):
        if in_order:
            line = expected[dim].view([-1 if place == dim else 1 for place in range(len(sizes))])
            in_order = bool((values.reshape(sizes) == line).all())
    if not in_order:
        raise CheckpointError(
            f"model: {source} is stored in another order than the model has it, which engine fsdp cannot read; use another engine"
        )
    rest = shape[len(sizes) :]
    return Piece(source, (*first, *(0 for _ in rest)), (*sizes, *rest))
