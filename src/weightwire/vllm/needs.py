"""Which slices of a checkpoint's tensors a vLLM worker loads, found by running the model's own loaders on tensors without memory.

Tensors on the ``meta`` device have shapes, offsets and strides, so that what a loader narrows, splits or transposes shows which
part it copies into a parameter. Nothing is written: the model's parameters are on ``meta`` meanwhile, and restored afterwards.
A tensor that a loader uses otherwise is needed completely, and one that it does not use is not needed.
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
from weightwire.vllm.checkpoint import EMBEDDINGS, HEAD
from weightwire.vllm.model import parameters_on_meta, storage_id


def worker_needs(model: torch.nn.Module, vllm_config: Any, tensors: Sequence[TensorSpec]) -> tuple[Region, ...]:
    """Return the slices that ``model.load_weights`` copies. The worker must not compute meanwhile, or copy its weights.

    Raises:
        PlanError: a loader needs the values of a tensor, or refuses the tensors.
    """
    from vllm.config import set_current_vllm_config

    sources = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in tensors]
    live = {storage_id(tensor) for module in model.modules() for tensor in _tensors(module)}
    recorder = Recorder(sources, live)
    try:
        with parameters_on_meta(model), set_current_vllm_config(vllm_config), torch.no_grad(), recorder:
            model.load_weights(  # type: ignore[operator]
                (spec.name, source) for spec, source in zip(tensors, sources, strict=True)
            )
    except Exception as error:
        raise PlanError(f"the loaders of this model cannot be observed: {type(error).__name__}: {error}") from error
    needs = disjoint(recorder.pieces())
    if getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False):
        needs += _tied(tensors, needs)
    return tuple(sorted(needs, key=lambda piece: (piece.tensor, piece.offsets)))


class Recorder(TorchDispatchMode):
    """Records which parts of ``sources`` are copied, and keeps the model's own memory from being written.

    Args:
        sources: tensors on ``meta``, one for each of the checkpoint's.
        live: storages of the model that stay in place.
    """

    def __init__(self, sources: Sequence[Tensor], live: set[int]) -> None:
        super().__init__()
        self._sources, self._live = sources, live
        self._numbers = {storage_id(source): number for number, source in enumerate(sources)}
        self._boxes: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self._complete: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if function is torch.ops.aten.copy_.default and (number := self._number(args[1])) is not None:
            self._boxes.setdefault(number, set()).add(_box(args[1], self._sources[number]))
            return first
        if first is not None and function._schema.is_mutable and storage_id(first) in self._live:
            return first
        result = function(*args, **(kwargs or {}))
        views = {storage_id(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves((args, kwargs)):
            number = self._number(leaf) if isinstance(leaf, Tensor) else None
            # The result has memory of its own: it has been computed from the tensor, all of which may count.
            if number is not None and not views <= {storage_id(leaf)}:
                self._complete.add(number)
        return result

    def pieces(self) -> Iterator[Region]:
        """Yield what was copied, with repetitions."""
        for number in sorted(self._complete):
            shape = tuple(self._sources[number].shape)
            if math.prod(shape):
                yield Region(number, (0,) * len(shape), shape)
        for number, boxes in self._boxes.items():
            if number not in self._complete:
                yield from (Region(number, *box) for box in sorted(boxes) if math.prod(box[1]))

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(storage_id(tensor))


def _box(view: Tensor, source: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the smallest slice of ``source`` that holds all elements of a view of it."""
    shape = tuple(source.shape)
    start = int(view.storage_offset())
    stop = start + sum(int((size - 1) * stride) for size, stride in zip(view.shape, view.stride(), strict=True))
    low, high = _coordinates(start, shape), _coordinates(stop, shape)
    sizes = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
    # Without stride 0, which would repeat elements; a view of another kind than a slice has more elements than the box.
    count = math.prod(size for size, stride in zip(view.shape, view.stride(), strict=True) if stride)
    if view.dtype != source.dtype or min(sizes, default=1) < 1 or math.prod(sizes) != count:
        return (0,) * len(shape), shape
    return low, sizes


def _coordinates(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    result = []
    for size in reversed(shape):
        result.append(index % size if size else 0)
        index //= size or 1
    return tuple(reversed(result))


def _tied(tensors: Sequence[TensorSpec], needs: Sequence[Region]) -> list[Region]:
    """Return the slices of a separate output layer that are compared with the embedding's, in whose place vLLM uses them."""
    head = next((number for number, spec in enumerate(tensors) if spec.name == HEAD), None)
    if head is None or any(piece.tensor == head for piece in needs):
        return []
    embedding = next((number for number, spec in enumerate(tensors) if spec.name.endswith(EMBEDDINGS)), None)
    return [Region(head, piece.offsets, piece.sizes) for piece in needs if piece.tensor == embedding]


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
        if isinstance(value, Tensor):
            yield value
