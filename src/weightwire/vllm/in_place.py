"""Commit by copying into the parameters in use, where the engine keeps weights as its loaders have copied them.

vLLM's loaders fuse tensors (query, key and value; gate and up; experts) and slice them (tensor and expert parallelism) by
copying parts of tensors into parts of parameters. :func:`record_copies` runs them once on tensors without memory and keeps these
copies in a :class:`Recording`. A commit then makes the copies itself: no loader, no allocation, and the addresses that kernels
and captured graphs use stay valid.

A recording is valid for every layout of an update in staging memory: whole tensors in buckets, or a worker's slices in the chunks
of a plan. For one layout it becomes an :class:`weightwire.vllm.exchange.Exchange`.

A model whose weights in use are anything else than such copies is refused: quantised or repacked weights, tensors computed from
weights. Such models are reloaded (:mod:`weightwire.vllm.model`). Before it is used, a recording is compared, bit for bit, with
the weights that vLLM's own reload of the same tensors has left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor

from weightwire.manifest import Manifest, TensorSpec
from weightwire.plan import Region, Share, overlapping
from weightwire.slices import Box, index_of, minus, overlap
from weightwire.staging import BucketLayout, ShardLayout
from weightwire.vllm.checkpoint import HEAD
from weightwire.vllm.exchange import Exchange, ExchangePart
from weightwire.vllm.needs import Recorder, as_slices, observe, tied_numbers

SEPARATE_BYTES = 64 * 2**20
"""Most bytes of old weights for which an exchange allocates memory, as they do not fit into the update's own."""
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
"""vLLM's quantisation methods that compute with the weights as they are loaded, on some devices and with some kernels."""
ATTENTION = ("Attention", "MMEncoderAttention", "EncoderOnlyAttention", "CrossAttention")
"""Attention layers whose step after loading computes nothing from weights, if they have no sinks."""


class NotInPlaceError(Exception):
    """The model's weights cannot be exchanged in place; the message says why."""


@dataclass(frozen=True)
class Copy:
    """A copy that a loader makes.

    Attributes:
        target: part of a parameter in use, with the sizes of the slice.
        source: slice of a tensor.
    """

    target: Tensor
    source: Region


def parameter_addresses(model: torch.nn.Module) -> dict[str, int]:
    """Return the addresses of all parameters: another one invalidates what was recorded."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}


class Recording:
    """Copies that a model's loaders make. They hold for every layout of an update's bytes.

    Args:
        copies: all copies, none of which overlap.
        tensors: specs of the updates for which they hold.
        addresses: addresses of the parameters' memory (:func:`parameter_addresses`).
        tied: numbers of an output layer and an embedding that must be equal.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        tensors: Sequence[TensorSpec],
        addresses: Mapping[str, int],
        tied: tuple[int, int] | None = None,
    ) -> None:
        self.copies, self.tensors = copies, tuple(tensors)
        self._addresses, self._tied = addresses, tied
        # (share of a plan, keep) of the last exchange, and the exchange or the reason why it is impossible.
        self._last: tuple[tuple[Share | None, bool], Exchange | str] | None = None

    def fits(self, manifest: Manifest, model: torch.nn.Module) -> bool:
        """Check whether an update has the tensors, and the model the memory, for which this was recorded."""
        same = manifest.tensors is self.tensors or manifest.tensors == self.tensors
        return same and parameter_addresses(model) == self._addresses

    def exchange(self, layout: BucketLayout | ShardLayout, *, keep: bool) -> Exchange:
        """Return the exchange for a layout; the one before is forgotten.

        Args:
            keep: the update's memory will be the base of later differences.
        """
        key = layout.share, keep
        if self._last is None or self._last[0] != key:
            self.unbind()
            self._last = None
            try:
                self._last = key, self._exchange(layout, keep)
            except NotInPlaceError as error:
                self._last = key, str(error)
        exchange = self._last[1]
        if isinstance(exchange, str):
            raise NotInPlaceError(exchange)
        return exchange

    def _exchange(self, layout: BucketLayout | ShardLayout, keep: bool) -> Exchange:
        pieces = PieceIndex(layout, self.tensors)
        parts = pieces.exchange_parts(self.copies)
        separate_bytes = sum(part.target.nbytes for part in parts if not part.has_room(keep))
        if separate_bytes > SEPARATE_BYTES:
            dtypes = [(copy.target.dtype, self.tensors[copy.source.tensor]) for copy in self.copies]
            name = next(spec.name for dtype, spec in dtypes if dtype != _torch_dtype(spec))
            raise NotInPlaceError(
                f"{separate_bytes} bytes of old weights do not fit into the update's memory (limit: {SEPARATE_BYTES}): {name}, "
                "for example, is sent in another dtype than the engine "
                f"uses{', and is the base of later differences' if keep else ''}"
            )
        return Exchange(parts, keep=keep, tied=self._tied_parts(pieces))

    def _tied_parts(self, pieces: PieceIndex) -> list[tuple[ExchangePart, ExchangePart]]:
        if self._tied is None:
            return []
        head, embedding = self._tied
        specs = self.tensors[head], self.tensors[embedding]
        if (specs[0].dtype, specs[0].shape) != (specs[1].dtype, specs[1].shape):
            raise NotInPlaceError(f"{HEAD} of the update differs from the embedding")
        placeholder = torch.empty(specs[0].shape, device="meta")
        pairs = []
        for piece, _ in pieces.by_tensor[head]:
            copy = Copy(placeholder[index_of(*piece.box)], Region(embedding, *piece.box))
            for box, part in pieces.intersections(copy):
                # Within one piece of the output layer.
                (_, head_part), *_ = pieces.intersections(Copy(part.target, Region(head, *box)))
                pairs.append((head_part, part))
        return pairs

    def unbind(self) -> None:
        """Release the views of staging memory that were made for the last update."""
        if self._last is not None and isinstance(self._last[1], Exchange):
            self._last[1].unbind()


class PieceIndex:
    """Index of the pieces of tensors in an update's bytes.

    Attributes:
        by_tensor: (slice without gaps, its first byte) of each piece, by the tensor's number.
    """

    def __init__(self, layout: BucketLayout | ShardLayout, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = tensors
        self.by_tensor: dict[int, list[tuple[Region, int]]] = defaultdict(list)
        for piece, start in layout.pieces():
            self.by_tensor[piece.tensor].append((piece, start))

    def exchange_parts(self, copies: Iterable[Copy]) -> list[ExchangePart]:
        """Return all parts of the copies in the order of an update's bytes."""
        parts = [part for copy in copies for _, part in self.intersections(copy)]
        return sorted(parts, key=lambda part: part.offset)

    def intersections(self, copy: Copy) -> Iterator[tuple[Box, ExchangePart]]:
        """Yield a copy's parts, one for each piece that the source's slice intersects, with the intersections."""
        source, dtype = copy.source, _torch_dtype(self._tensors[copy.source.tensor])
        missing = source.volume
        for piece, start in self.by_tensor[source.tensor]:
            common = overlap(*source.box, *piece.box)
            if common is None:
                continue
            offsets, sizes = common
            missing -= math.prod(sizes)
            strides = tuple(math.prod(piece.sizes[dim + 1 :]) for dim in range(len(sizes)))
            first = sum(map(mul, minus(offsets, piece.offsets), strides))
            if start % dtype.itemsize:
                raise NotInPlaceError("a tensor of the update is not aligned to its dtype")
            target = copy.target[index_of(minus(offsets, source.offsets), sizes)]
            yield common, ExchangePart(target, dtype, start + first * dtype.itemsize, sizes, strides)
        if missing:
            raise NotInPlaceError(f"the update has not all of {self._tensors[source.tensor].name} that is loaded")


def record_copies(
    model: torch.nn.Module,
    vllm_config: Any,
    tensors: Sequence[TensorSpec],
    layout: BucketLayout | ShardLayout,
    staging: Tensor,
    changed_elsewhere: Callable[[set[int]], str | None],
) -> Recording:
    """Record how the model's loaders distribute an update that vLLM's reload has just loaded. The engine must be paused.

    Args:
        staging: the update's bytes.
        changed_elsewhere: returns the name of a tensor that the reload has changed and that is in none of the storages with these
            addresses; None if there is none.
    """
    _require_plain(model, vllm_config)
    try:
        recorder = observe(model, vllm_config, tensors)
    except Exception as error:
        # Whatever a loader cannot do without memory: the reload can load this model, and this cannot.
        raise NotInPlaceError(f"{type(error).__name__}: {error}") from error
    tied = tied_numbers(vllm_config, tensors)
    # The output layer equals the embedding, as Exchange.run checks, and is loaded into the same memory or not at all.
    copies = distinct(copy for copy in _copies(recorder, tensors) if tied is None or copy.source.tensor != tied[0])
    _require_complete(model, copies, [_part_in_use(part, recorder) for part in recorder.zeros])
    if (name := changed_elsewhere({copy.target.untyped_storage().data_ptr() for copy in copies})) is not None:
        raise NotInPlaceError(f"{name} is computed from weights")
    for part in PieceIndex(layout, tensors).exchange_parts(copies):
        # What the kernels use may have been reordered or padded after loading; then it differs from what the loader copied.
        if not torch.equal(part.target, part.source(staging).to(part.target.dtype)):
            raise NotInPlaceError("the weights in use are not in the order of the checkpoint")
    return Recording(copies, tensors, parameter_addresses(model), tied)


def _require_plain(model: torch.nn.Module, vllm_config: Any) -> None:
    if vllm_config.model_config.quantization is not None:
        raise NotInPlaceError(f"the engine quantises weights ({vllm_config.model_config.quantization})")
    # Experts then move between workers at any time.
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise NotInPlaceError("the engine balances experts between its workers")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kinds = [kind.__name__ for kind in type(method).__mro__]
        if method is not None and not any(kind in PLAIN_METHODS for kind in kinds):
            raise NotInPlaceError(f"{name} has the method {type(method).__name__}")
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any(kind in PLAIN_METHODS for kind in kinds):
            continue  # a method that is a module itself
        if callable(getattr(module, "process_weights_after_loading", None)) and (
            not any(kind in ATTENTION for kind in kinds)
            or "MLAAttention" in kinds
            or getattr(getattr(module, "impl", None), "sinks", None) is not None
        ):
            raise NotInPlaceError(f"{name} ({type(module).__name__}) computes tensors after loading")


def _copies(recorder: Recorder, tensors: Sequence[TensorSpec]) -> Iterator[Copy]:
    """Yield the recorded copies with their targets in the parameters in use."""
    if recorder.problem:
        raise NotInPlaceError(recorder.problem)
    for name, (loaded, live) in recorder.targets.items():
        if live is not None and (loaded.shape, loaded.dtype, loaded.stride()) != (
            live.shape,
            live.dtype,
            live.stride(),
        ):
            raise NotInPlaceError(
                f"{name} has another layout in use: {live.dtype} {list(live.shape)}, loaded {list(loaded.shape)}"
            )
    for target, number, view in recorder.copies:
        if recorder.name(target) is None:
            raise NotInPlaceError(f"a loader copies {tensors[number].name} into a tensor that is no parameter")
        parts = as_slices(view.expand(target.shape), recorder.sources[number], _part_in_use(target, recorder))
        if parts is None:
            raise NotInPlaceError(
                f"the loader of {recorder.name(target)} does not copy a slice of {tensors[number].name}"
            )
        for box, part in parts:
            yield Copy(part, Region(number, *box))


def _part_in_use(target: Tensor, recorder: Recorder) -> Tensor:
    """Return the part of a parameter in use at the place of a part of the loaded one, whose layout is the same."""
    name = recorder.name(target)
    live = None if name is None else recorder.targets[name][1]
    if live is None:
        raise NotInPlaceError(f"a loader fills {name or 'a tensor that is no parameter'}, which is not in use")
    return live.detach().as_strided(target.shape, target.stride(), live.storage_offset() + target.storage_offset())


def distinct(copies: Iterable[Copy]) -> list[Copy]:
    """Drop repeated copies; raise NotInPlaceError if two copies share bytes of a parameter or elements of a tensor."""
    unique: dict[tuple[Any, ...], Copy] = {}
    for copy in copies:
        # Tied parameters are loaded twice from one tensor.
        unique.setdefault((copy.target.data_ptr(), copy.target.stride(), copy.source), copy)
    # Exchanged twice, an old weight would be taken for a new one.
    spans = sorted((copy.target.data_ptr(), _span(copy.target)) for copy in unique.values())
    boxes: dict[int, list[Box]] = defaultdict(list)
    for copy in unique.values():
        boxes[copy.source.tensor].append(copy.source.box)
    if any(start + length > following for (start, length), (following, _) in pairwise(spans)) or any(
        map(overlapping, boxes.values())
    ):
        raise NotInPlaceError("a tensor is loaded into two parameters, or two tensors into one")
    return list(unique.values())


def _span(part: Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    ) * part.itemsize


def _require_complete(model: torch.nn.Module, copies: Sequence[Copy], constants: Sequence[Tensor]) -> None:
    """Check that every element of every parameter has a source."""
    regions: dict[int, dict[tuple[int, ...], int]] = {}
    for target in (*(copy.target for copy in copies), *constants):
        region = (int(target.storage_offset()), *target.shape, *target.stride())
        regions.setdefault(target.untyped_storage().data_ptr(), {})[region] = target.numel()
    for name, parameter in model.named_parameters():
        if sum(regions.get(parameter.untyped_storage().data_ptr(), {}).values()) != parameter.numel():
            raise NotInPlaceError(f"{name} is not loaded from the update's tensors alone")


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)
