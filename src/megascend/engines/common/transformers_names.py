"""Map a transformers model's tensors to their names in the checkpoint, and to slices of its parameters.

transformers has this map only as a conversion of complete tensors. The slices are derived by converting tensors of row numbers in
place of weights, once for every layer: the result under a checkpoint name lists the parameter and the rows that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.exported import abbreviated
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.training.checkpoint.hf_slices import HfSlice
from weightwire.manifest import LAYER

_NUMBERS = 2**32
"""An element is parameter number * _NUMBERS + row number."""


def in_checkpoint(model: Any, tensors: Mapping[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
    """Convert all tensors of a layer to the names and the parts that they have in the checkpoint.

    transformers fuses experts that many checkpoints store separately; they are split again, as ``save_pretrained`` does, unless
    the checkpoint has them fused.

    Args:
        stored: names of the checkpoint's tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = _Complete(model, tensors)
    reverted = revert_weight_conversion(model, dict(tensors))
    if all(name in stored for name in reverted):
        return reverted
    same = {name: tensor for name, tensor in tensors.items() if name in stored}
    converted = {name: tensor for name, tensor in tensors.items() if name not in stored}
    return same | (revert_weight_conversion(model, converted) if converted else {})


class _Complete:
    """A model as transformers' conversion sees it, with parameters of the shapes that are converted.

    The conversion of Qwen3-VL's experts transposes those that have another shape than the model's parameter; under expert
    parallelism that has fewer experts, and in :func:`tensor_slices` the tensors are numbers in place of weights.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Any:
        return self._tensors[name] if name in self._tensors else self._model.get_parameter(name)


def tensor_slices(model: Any, headers: Mapping[str, TensorHeader]) -> dict[str, list[HfSlice]]:
    """Return, for each parameter and persistent buffer, the complete checkpoint tensors that it is read from.

    A slice's ``weight_offsets`` are all 0; the weight may lack its first dimension, the 1 of a single expert, or be transposed
    (:func:`is_transposed`).

    Args:
        model: a transformers model; may be on ``meta``, not yet sharded.
        headers: headers of those tensors of the checkpoint that the model has.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in persistent_tensors(model).items()}
    if empty := next((name for name, shape in shapes.items() if 0 in shape), None):
        numbers = model.config.get_text_config().to_dict().items()
        zeros = [key for key, value in numbers if value == 0 and key.startswith(("n_", "num_", "moe_num_"))]
        raise CheckpointError(
            f"model: {empty} has no values ({', '.join(zeros)}: 0), and engine fsdp divides each tensor; use engine single"
        )
    slices: dict[str, list[HfSlice]] = {}
    for _, names in groupby(shapes, key=layer_of):
        slices |= _slices_of_layer(model, {name: shapes[name] for name in names}, headers)
    used = {hf_slice.weight for parts in slices.values() for hf_slice in parts}
    unused = sorted(name for name in headers if name not in used)
    if unused:
        raise CheckpointError(
            f"model: {abbreviated(unused)} in the checkpoint, and no part of {type(model).__name__} of config.json is read from "
            "there: correct config.json, or remove the tensors"
        )
    for name, parts in slices.items():
        covered = sum(math.prod(hf_slice.sizes) for hf_slice in parts)
        if covered != math.prod(shapes[name]):
            raise CheckpointError(
                f"model: {name} is not read completely: {covered} of {math.prod(shapes[name])} values"
            )
    return slices


def is_transposed(stored: Sequence[int], sizes: Sequence[int]) -> bool:
    """Check whether a checkpoint has fused experts as [experts, in, out] where the model's ``sizes`` are [experts, out, in]."""
    # transformers decides by the shapes, too: square matrices are not transposed.
    return len(stored) == 3 and tuple(stored) != tuple(sizes) == (stored[0], stored[2], stored[1])


def as_stored(tensor: Tensor, header: TensorHeader | None) -> Tensor:
    """Transpose fused experts that the checkpoint has as [experts, in, out], which transformers reads but writes otherwise."""
    return tensor.mT.contiguous() if header is not None and is_transposed(header.shape, tensor.shape) else tensor


def check_rows(slices: Mapping[str, Sequence[HfSlice]], headers: Mapping[str, TensorHeader]) -> None:
    """Raise CheckpointError if a slice of a parameter is not a slice of its weight as the checkpoint stores it."""
    for hf_slice in (part for parts in slices.values() for part in parts):
        if is_transposed(headers[hf_slice.weight].shape, hf_slice.sizes):
            raise CheckpointError(
                f"{hf_slice.weight} is stored as [experts, in, out], not as [experts, out, in]: load and save the model once "
                "with transformers 5"
            )


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by name, in its order, tied ones under their first name only."""
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True).items()
    # By identity: state_dict lists a tied weight under every name.
    return {name: tensor for name, tensor in tensors if first.setdefault(id(tensor), name) == name}


def layer_of(name: str) -> str:
    """Return the part of a tensor's name that all tensors of its layer have in common."""
    match = LAYER.search(name)
    return match[0] if match else ""


def _slices_of_layer(
    model: Any, shapes: Mapping[str, tuple[int, ...]], headers: Mapping[str, TensorHeader]
) -> dict[str, list[HfSlice]]:
    names = list(shapes)
    # An element holds one index, so the rows and the columns of fused experts take two conversions.
    rows, columns = (
        in_checkpoint(model, {name: _numbers(shapes[name], number, dim) for number, name in enumerate(names)}, headers)
        for dim in (0, 1)
    )
    slices: dict[str, list[HfSlice]] = {name: [] for name in names}
    for source, values in rows.items():
        if source not in headers:
            raise CheckpointError(
                f"model: the checkpoint has no {source}, which {type(model).__name__}, as config.json describes it, needs: "
                "correct config.json, or fetch the files again"
            )
        name = names[int(values.flatten()[0]) // _NUMBERS]
        offsets, sizes = _offsets_and_sizes(source, values % _NUMBERS, columns[source] % _NUMBERS, shapes[name])
        stored = headers[source].shape
        # Dimensions of size 1 may be missing: a single expert is stored without the expert dimension.
        equal = tuple(size for size in sizes if size > 1) == tuple(size for size in stored if size > 1)
        if not equal and not is_transposed(stored, sizes):
            raise CheckpointError(
                f"model: {source} has shape {list(stored)} in the checkpoint, {list(sizes)} is needed for {name}"
            )
        slices[name].append(HfSlice(offsets, sizes, source, (0,) * len(stored)))
    return slices


def _numbers(shape: tuple[int, ...], parameter: int, dim: int) -> Tensor:
    """Return a tensor of the parameter's number and the indices along ``dim``; dimensions after the second have size 1.

    A matrix is represented by its rows: only fused experts are split in two dimensions.
    """
    numbered = 2 if len(shape) > 2 else 1
    sizes = [size if axis < numbered else 1 for axis, size in enumerate(shape)]
    values = torch.full(sizes, parameter * _NUMBERS, dtype=torch.int64)
    if dim < numbered and sizes:
        values += torch.arange(sizes[dim]).view([-1 if axis == dim else 1 for axis in range(len(sizes))])
    return values


def _offsets_and_sizes(
    source: str, rows: Tensor, columns: Tensor, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the slice of a parameter of ``shape`` whose elements have these indices; raise if they are not one in order."""
    first = [int(rows.min()), int(columns.min())]
    sizes = [int(rows.max()) - first[0] + 1, int(columns.max()) - first[1] + 1]
    if len(shape) <= 2:  # a matrix's columns are all there
        first, sizes = first[:1], sizes[:1]
    first, sizes = first[: len(shape)], sizes[: len(shape)]
    expected = [torch.arange(start, start + size) for start, size in zip(first, sizes, strict=True)]
    in_order = math.prod(sizes) == rows.numel()
    for dim, values in enumerate((rows, columns)[: len(sizes)]):
        if in_order:
            line = expected[dim].view([-1 if axis == dim else 1 for axis in range(len(sizes))])
            in_order = bool((values.reshape(sizes) == line).all())
    if not in_order:
        raise CheckpointError(
            f"model: {source} is stored in another order than the model has it, which engine fsdp cannot read; use engine single"
        )
    rest = shape[len(sizes) :]
    return (*first, *(0 for _ in rest)), (*sizes, *rest)
