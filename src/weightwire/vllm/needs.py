"""Observe a model's loaders on tensors without memory: which slices of a checkpoint's tensors they copy, and to where.

Tensors on the ``meta`` device have shapes, offsets and strides, so that what a loader narrows, splits or transposes shows which
part it copies into which part of a parameter. Nothing is written: the model's parameters are on ``meta`` meanwhile, and restored
afterwards. The slices are a worker's needs in a sharded update: a tensor that a loader uses otherwise is needed completely, and
one that it does not use is not needed. The copies are those that :mod:`weightwire.vllm.in_place` makes itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightwire.errors import PlanError
from weightwire.manifest import TensorSpec
from weightwire.plan import Region, disjoint
from weightwire.slices import Box
from weightwire.vllm.checkpoint import EMBEDDINGS, HEAD
from weightwire.vllm.model import parameters_on_meta, storage_id

MAX_SLICES = 4096
"""Slices into which one copy is divided, at most."""


def worker_needs(model: torch.nn.Module, vllm_config: Any, tensors: Sequence[TensorSpec]) -> tuple[Region, ...]:
    """Return the slices that ``model.load_weights`` copies. The worker must not compute meanwhile, or copy its weights."""
    try:
        recorder = observe(model, vllm_config, tensors)
    except Exception as error:
        raise PlanError(f"the loaders of this model cannot be observed: {type(error).__name__}: {error}") from error
    needs = disjoint(recorder.pieces())
    if (tied := tied_numbers(vllm_config, tensors)) is not None:
        head, embedding = tied
        # Of a separate output layer, the slices of the embedding, in whose place vLLM uses it: the two are compared.
        if all(piece.tensor != head for piece in needs):
            needs += [Region(head, piece.offsets, piece.sizes) for piece in needs if piece.tensor == embedding]
    return tuple(sorted(needs, key=lambda piece: (piece.tensor, piece.offsets)))


def observe(model: torch.nn.Module, vllm_config: Any, tensors: Sequence[TensorSpec]) -> Recorder:
    """Run ``model.load_weights`` on tensors without memory, and return what it has done. Any error of a loader is raised."""
    from vllm.config import set_current_vllm_config

    sources = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in tensors]
    live = {storage_id(tensor) for module in model.modules() for tensor in _tensors(module)}
    in_use = _parameters(model)
    with parameters_on_meta(model), set_current_vllm_config(vllm_config), torch.no_grad():
        targets = {name: (loaded, in_use.get(name)) for name, loaded in _parameters(model).items()}
        with Recorder(sources, targets, live) as recorder:
            model.load_weights(  # type: ignore[operator]
                (spec.name, source) for spec, source in zip(tensors, sources, strict=True)
            )
    return recorder


class Recorder(TorchDispatchMode):
    """Records copies of parts of ``sources``, and keeps the model's memory from being written.

    Args:
        sources: tensors on ``meta``, one for each of the checkpoint's.
        targets: by name, the parameter or buffer that loaders work with, and the one in use, in whose place it stands; None if
            none of this name is in use.
        live: storages of the model that stay in place.

    Attributes:
        copies: (target, number of the source, view of the source); the target's shape may repeat the view.
        zeros: parts of targets that are filled with zeros: the padding of a vocabulary.
        problem: first use of a target that is no copy of a source; empty without any.
    """

    def __init__(
        self, sources: Sequence[Tensor], targets: dict[str, tuple[Tensor, Tensor | None]], live: set[int]
    ) -> None:
        super().__init__()
        self.sources, self.targets = sources, targets
        self.copies: list[tuple[Tensor, int, Tensor]] = []
        self.zeros: list[Tensor] = []
        self.problem = ""
        self._names = {storage_id(loaded): name for name, (loaded, _) in targets.items()}
        self._live = live
        self._numbers = {storage_id(source): number for number, source in enumerate(sources)}
        self._complete: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if function is torch.ops.aten.copy_.default and (number := self._number(args[1])) is not None:
            self.copies.append((args[0], number, args[1]))
            return first
        target = first if function._schema.is_mutable else None
        is_live = storage_id(target) in self._live
        if target is not None and (is_live or self.name(target)):
            self._note(function, target, args)
        result = target if is_live else function(*args, **(kwargs or {}))
        views = {storage_id(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            number = self._number(leaf) if isinstance(leaf, Tensor) else None
            # The result has memory of its own: it has been computed from the tensor, all of which may count.
            if number is not None and not views <= {storage_id(leaf)}:
                self._complete.add(number)
        return result

    def _note(self, function: Any, target: Tensor, args: Sequence[Any]) -> None:
        """Note a change of a target other than a copy of a source."""
        if function is torch.ops.aten.zero_.default or (function is torch.ops.aten.fill_.Scalar and args[1] == 0):
            self.zeros.append(target)
        elif not self.problem:
            action = "computes what it copies" if function is torch.ops.aten.copy_.default else f"calls {function}"
            self.problem = f"the loader of {self.name(target) or 'a tensor that is no parameter'} {action}"

    def name(self, target: Tensor) -> str | None:
        """Return the name of the parameter or buffer of which ``target`` is a part; None if it is of none."""
        return self._names.get(storage_id(target))

    def pieces(self) -> Iterator[Region]:
        """Yield the slices that are needed, with repetitions."""
        boxes: dict[int, set[Box]] = {}
        for _, number, view in self.copies:
            for dim in reversed(range(view.dim())):
                if view.stride(dim) == 0 and view.shape[dim] > 1:  # repeats elements
                    view = view.select(dim, 0)
            parts = as_slices(view, self.sources[number], view)
            if parts is None:
                self._complete.add(number)
            else:
                boxes.setdefault(number, set()).update(box for box, _ in parts)
        for number in sorted(self._complete):
            shape = tuple(self.sources[number].shape)
            if math.prod(shape):
                yield Region(number, (0,) * len(shape), shape)
        for number, parts in boxes.items():
            if number not in self._complete:
                yield from (Region(number, *box) for box in sorted(parts))

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(storage_id(tensor))


def as_slices(view: Tensor, source: Tensor, target: Tensor) -> list[tuple[Box, Tensor]] | None:
    """Return the slices of ``source`` that make up a view of it, and the parts of ``target`` at their places in the view.

    A transposed, flattened or divided slice is one slice; the parts of the target have the sizes of theirs.

    Args:
        source: contiguous.
        target: has the view's shape.

    Returns:
        None if the view is no union of at most :data:`MAX_SLICES` slices. They overlap if it repeats elements.
    """
    if view.dtype != source.dtype:
        return None
    if not view.numel():
        return []
    if (part := _as_slice(view, source, target)) is not None:
        return [part]
    # By rows: a loader may take a part of each expert out of one dimension of the source.
    dim = max(range(view.dim()), key=lambda dim: (view.shape[dim] > 1, view.stride(dim)))
    if view.stride(dim) == 0 or view.shape[dim] > MAX_SLICES:
        return None
    slices: list[tuple[Box, Tensor]] = []
    for row, target_row in zip(view.unbind(dim), target.unbind(dim), strict=True):
        inner = as_slices(row, source, target_row)
        if inner is None or len(slices) + len(inner) > MAX_SLICES:
            return None
        slices += inner
    return slices


def _as_slice(view: Tensor, source: Tensor, target: Tensor) -> tuple[Box, Tensor] | None:
    shape = tuple(source.shape)
    start = int(view.storage_offset())
    stop = start + sum(int((size - 1) * stride) for size, stride in zip(view.shape, view.stride(), strict=True))
    low, high = _coordinates(start, shape), _coordinates(stop, shape)
    sizes = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
    if min(sizes, default=1) < 1 or math.prod(sizes) != view.numel():
        return None

    def matches(part: Tensor) -> bool:
        strides = zip(sizes, part.shape, part.stride(), source.stride(), strict=True)
        return all(size == length and (size == 1 or a == b) for size, length, a, b in strides)

    if view.dim() == len(sizes) and matches(view):  # most of them, of tens of thousands
        return (low, sizes), target
    # In this order of dimensions, the view's elements are in the order of the source's memory.
    order = sorted(range(view.dim()), key=view.stride, reverse=True)
    try:
        ordered, part = view.permute(order).view(sizes), target.permute(order).view(sizes)
    except RuntimeError:  # torch's way to say that there is no such view
        return None
    return ((low, sizes), part) if matches(ordered) else None


def _coordinates(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of an element of a contiguous tensor."""
    coordinates = []
    for size in reversed(shape):
        coordinates.append(index % size if size else 0)
        index //= size or 1
    return tuple(reversed(coordinates))


def tied_numbers(vllm_config: Any, tensors: Sequence[TensorSpec]) -> tuple[int, int] | None:
    """Return the numbers of an output layer and of the embedding in whose place vLLM does not use it."""
    if not getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False):
        return None
    head = [number for number, spec in enumerate(tensors) if spec.name == HEAD]
    embedding = [number for number, spec in enumerate(tensors) if spec.name.endswith(EMBEDDINGS)]
    return (head[0], embedding[0]) if head and embedding else None


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    }


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
        if isinstance(value, Tensor):
            yield value
