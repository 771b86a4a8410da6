"""Commit by copying into the parameters in use, where the engine keeps weights as its loaders have copied them.

vLLM's loaders fuse tensors (query, key and value; gate and up; experts) and slice them (tensor and expert parallelism) by
copying parts of tensors into parts of parameters. :func:`learn` runs them once on tensors without memory and records these
copies (:class:`Recording`). A commit then makes the copies itself: no loader, no allocation, and the addresses that kernels and
captured graphs use stay valid.

A recording holds for every layout of an update in staging memory: whole tensors in buckets, or a worker's slices in the chunks of
a plan. An :class:`Exchange` has the places of one layout.

Each part of a parameter is exchanged with its source in the staging memory, which holds the old weights afterwards. So a commit
can be undone without another copy of the model. On CUDA with Triton one kernel exchanges the parts whose bytes both sides have in
the same order, which are nearly all: it reads and writes every byte once. Others, and other devices, take three copies through
scratch memory. If the memory is to be the base of later differences, the new weights are copied back into it when the commit is
settled.

:func:`learn` refuses a model whose weights in use are anything else than such copies: quantised or repacked weights, tensors
computed from weights. Such models are reloaded (:mod:`weightwire.vllm.model`). What was recorded is compared with the weights
that vLLM's own reload of the same tensors has left, bit for bit, before it is used.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor

from weightwire.digest import has_triton
from weightwire.manifest import Manifest, TensorSpec
from weightwire.plan import Region, Share, overlapping
from weightwire.slices import Box, index_of, minus, overlap
from weightwire.staging import ALIGNMENT, ROW_BYTES, BucketLayout, ShardLayout
from weightwire.vllm import contract
from weightwire.vllm.checkpoint import EMBEDDINGS, HEAD, require_equal_head
from weightwire.vllm.needs import Recorder, as_slices, observe

log = logging.getLogger(__name__)

SCRATCH_BYTES = 64 * 2**20
"""Memory through which parts are exchanged that the kernel does not exchange. It is allocated once."""
SWAP_BYTES = 2**30
"""Size of a group that the kernel exchanges: an exchange that stops leaves those after it as they were."""
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


@dataclass(frozen=True)
class ExchangePart:
    """A part of a parameter and its source in an update's bytes.

    Attributes:
        target: the part of the parameter, on the engine's device.
        dtype: dtype of the source.
        offset: first byte of the source.
        shape, strides: shape and strides of the source, in elements.
    """

    target: Tensor
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Check whether both sides are ranges of bytes without gaps, in the same order."""
        return self.target.is_contiguous() and self.strides == torch.empty(self.shape, device="meta").stride()

    def source(self, staging: Tensor) -> Tensor:
        """View the source in an update's bytes."""
        width = self.dtype.itemsize
        typed = staging[: staging.numel() // width * width].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset // width)

    def has_room(self, keep: bool) -> bool:
        """Check whether the source's bytes can hold the old weights; with ``keep``, only if the new ones are its content."""
        if self.target.dtype == self.dtype:
            return True
        # A source of float32 has room for an old weight of bfloat16 at the beginning of its bytes.
        width = self.target.dtype.itemsize
        return not keep and width <= self.dtype.itemsize and self.dense and self.offset % width == 0

    def saved(self, staging: Tensor) -> Tensor:
        """View the place for the old weights in the source's bytes, which have room for them."""
        if self.target.dtype == self.dtype:
            return self.source(staging)
        width = self.target.dtype.itemsize
        length = self.target.numel() * width
        return staging[self.offset : self.offset + length].view(self.target.dtype).view(self.target.shape)


SwapKernel = Callable[[Tensor, int], object]
"""Exchanges the rows of a table: see :func:`weightwire.vllm.swap_triton.swap_rows`."""


@cache
def swap_kernel(device: torch.device) -> SwapKernel | None:
    """Return the kernel that exchanges rows of memory in one pass, compiled for a device; None: copies exchange them."""
    if device.type != "cuda" or os.environ.get(contract.SWAP_KERNEL) != "1" or not has_triton():
        return None
    try:
        from weightwire.vllm import swap_triton

        swap_triton.check_kernels(device)
    except Exception:  # Triton's versions and compilers are the engine's
        log.exception(
            "no kernel exchanges weights on %s: they take three copies in each update: it pauses longer", device
        )
        return None
    return swap_triton.swap_rows


class Exchange:
    """Exchange of a model's weights with those in staging memory, group by group.

    Args:
        parts: all parts, none of which overlap.
        keep: :meth:`refill` will be called.
        tied: (part of the output layer, part of the embedding) that must be equal; their targets are not used.
    """

    def __init__(
        self,
        parts: Sequence[ExchangePart],
        *,
        keep: bool = False,
        tied: Sequence[tuple[ExchangePart, ExchangePart]] = (),
    ) -> None:
        self._parts, self._keep, self._tied = split(merged(parts)), keep, tied
        # A worker may load nothing of an update.
        device = self._parts[0].target.device if self._parts else torch.device("cpu")
        self._kernel = swap_kernel(device)
        copied = sum(part.target.nbytes + ALIGNMENT for part in self._parts if not self._swaps(part))
        self._scratch = torch.empty(min(copied, SCRATCH_BYTES), dtype=torch.uint8, device=device)
        # Of the parts whose old weights do not fit into their sources' bytes: few, or Recording would have refused.
        self._separate: dict[int, Tensor] = {}
        self._bound: tuple[int, list[_Swap | _Group]] = 0, []
        self._changed_groups: list[_Swap | _Group] = []

    def bind(self, staging: Tensor) -> None:
        """Prepare a run for staging memory, which need not have its content yet: the engine need not be paused for it."""
        # Views are made once: the receiver keeps its memory from one update to the next.
        if self._bound[0] != staging.data_ptr():
            self._bound = staging.data_ptr(), [*self._swap_groups(staging), *self._copy_groups(staging)]

    @torch.no_grad()
    def run(self, staging: Tensor) -> None:
        """Write the new weights into the parameters, and the old ones into the staging memory."""
        self._changed_groups = []
        # Loaders drop an output layer that the model shares with its embedding; a different one must not be lost.
        for head, embedding in self._tied:
            require_equal_head(head.source(staging), embedding.source(staging))
        self.bind(staging)
        for group in self._bound[1]:
            # Noted first: a group that fails has changed some of its parameters.
            self._changed_groups.append(group)
            group.exchange()

    @torch.no_grad()
    def undo(self) -> None:
        """Write the old weights back after a run that succeeded or stopped at any group."""
        groups, self._changed_groups = self._changed_groups, []
        for group in groups:
            group.restore()

    @torch.no_grad()
    def refill(self, staging: Tensor) -> None:
        """Copy the new weights back into the staging memory after a run, so that it holds what was received."""
        self.bind(staging)
        for group in self._bound[1]:
            group.refill()

    def unbind(self) -> None:
        """Release the views of staging memory that were made for the last update."""
        self._bound, self._changed_groups = (0, []), []

    def _swaps(self, part: ExchangePart) -> bool:
        return self._kernel is not None and part.dense and part.target.dtype == part.dtype

    def _swap_groups(self, staging: Tensor) -> Iterator[_Swap]:
        pairs: list[tuple[Tensor, Tensor]] = []
        size = 0
        for part in filter(self._swaps, self._parts):
            if pairs and size + part.target.nbytes > SWAP_BYTES:
                yield _Swap(pairs, self._kernel)  # type: ignore[arg-type]
                pairs, size = [], 0
            pairs.append((part.target, part.source(staging)))
            size += part.target.nbytes
        if pairs:
            yield _Swap(pairs, self._kernel)  # type: ignore[arg-type]

    def _copy_groups(self, staging: Tensor) -> Iterator[_Group]:
        group, used = _Group(), 0
        kind: tuple[torch.dtype, torch.dtype] | None = None
        for index, part in enumerate(self._parts):
            if self._swaps(part):
                continue
            size = part.target.numel() * part.target.dtype.itemsize
            if group.targets and (used + size > SCRATCH_BYTES or kind != (part.target.dtype, part.dtype)):
                yield group
                group, used = _Group(), 0
            kind = part.target.dtype, part.dtype
            if part.has_room(self._keep):
                saved = part.saved(staging)
            else:
                saved = self._separate.setdefault(index, torch.empty_like(part.target))
            scratch = self._scratch[used : used + size].view(part.target.dtype).view(part.target.shape)
            group.add(part.target, part.source(staging), saved, scratch)
            used += -(-size // ALIGNMENT) * ALIGNMENT
        if group.targets:
            yield group


class _Swap:
    """Parts that the kernel exchanges. To exchange them again undoes it."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], kernel: SwapKernel) -> None:
        self.targets, self._sources = (list(side) for side in zip(*pairs, strict=True))
        self._kernel, self._exchanged = kernel, 0
        ranges = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in pairs]
        self._tables = [(table.to(self.targets[0].device), width) for table, width in swap_tables(ranges)]

    def exchange(self) -> None:
        self._exchanged = 0
        for table, width in self._tables:
            self._kernel(table, width)
            self._exchanged += 1

    def restore(self) -> None:
        for table, width in self._tables[: self._exchanged]:
            self._kernel(table, width)
        self._exchanged = 0

    def refill(self) -> None:
        torch._foreach_copy_(self._sources, self.targets)


def swap_tables(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[Tensor, int]]:
    """Cut pairs of ranges of bytes into rows for the kernel.

    Args:
        ranges: two addresses and a number of bytes of each pair.

    Returns:
        (int64 [rows, 3]: two addresses and a number of bytes, width) for each width: 16 for rows of :data:`ROW_BYTES` at
        addresses that are multiples of 16, else the largest of 4, 2 and 1 that divides addresses and bytes.
    """
    tables: dict[int, list[Tensor]] = defaultdict(list)
    for left, right, size in ranges:
        long_rows = size // ROW_BYTES if (left | right) % ALIGNMENT == 0 else 0
        steps = torch.arange(0, size, ROW_BYTES, dtype=torch.int64)
        rows = torch.stack([left + steps, right + steps, (size - steps).clamp(max=ROW_BYTES)], dim=1)
        if long_rows:
            tables[16].append(rows[:long_rows])
        if len(rows) > long_rows:
            width = next(width for width in (4, 2, 1) if (left | right | size) % width == 0)
            tables[width].append(rows[long_rows:])
    return [(torch.cat(rows), width) for width, rows in sorted(tables.items(), reverse=True)]


class _Group:
    """Parts that are exchanged together, in four lists of equal length."""

    def __init__(self) -> None:
        self.targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._steps = 0

    def add(self, target: Tensor, source: Tensor, saved: Tensor, scratch: Tensor) -> None:
        self.targets.append(target)
        self._sources.append(source)
        self._saved.append(saved)
        self._scratch.append(scratch)

    def exchange(self) -> None:
        self._steps = 0
        for to, origin in (
            (self._scratch, self.targets),
            (self.targets, self._sources),
            (self._saved, self._scratch),
        ):
            torch._foreach_copy_(to, origin)
            self._steps += 1

    def restore(self) -> None:
        """Write the old weights back: from their place or, of a group that has stopped, from the scratch memory."""
        if self._steps == 3:
            torch._foreach_copy_(self.targets, self._saved)
        elif self._steps:  # the last group alone: the next one would have overwritten the scratch memory
            torch._foreach_copy_(self.targets, self._scratch)

    def refill(self) -> None:
        """Write the new weights into their sources; those of another dtype were saved elsewhere, and have not changed."""
        if self.targets[0].dtype == self._sources[0].dtype:
            torch._foreach_copy_(self._sources, self.targets)


def merged(parts: Iterable[ExchangePart]) -> list[ExchangePart]:
    """Merge parts that are adjacent in a parameter and in the update: gate and up of an expert, layers of one tensor."""
    result: list[ExchangePart] = []
    for part in parts:
        last = result[-1] if result else None
        if part.dense:
            part = ExchangePart(part.target.reshape(-1), part.dtype, part.offset, (part.target.numel(),), (1,))
            if (
                last is not None
                and last.dense
                and last.dtype == part.dtype
                and last.target.dim() == 1
                and last.target.dtype == part.target.dtype
                and last.offset + last.target.numel() * part.dtype.itemsize == part.offset
                and last.target.data_ptr() + last.target.nbytes == part.target.data_ptr()
                and last.target.untyped_storage().data_ptr() == part.target.untyped_storage().data_ptr()
            ):
                count = last.target.numel() + part.target.numel()
                union = last.target.as_strided((count,), (1,))
                result[-1] = ExchangePart(union, part.dtype, last.offset, (count,), (1,))
                continue
        result.append(part)
    return result


def split(parts: Iterable[ExchangePart]) -> list[ExchangePart]:
    """Split parts that exceed the scratch memory."""
    result: list[ExchangePart] = []
    for part in parts:
        if part.target.nbytes <= SCRATCH_BYTES:
            result.append(part)
        elif part.target.dim() == 1:
            step = SCRATCH_BYTES // part.target.dtype.itemsize
            for first in range(0, part.target.numel(), step):
                target = part.target[first : first + step]
                offset = part.offset + first * part.strides[0] * part.dtype.itemsize
                result.append(ExchangePart(target, part.dtype, offset, tuple(target.shape), part.strides))
        else:
            # By rows: a row of any parameter is smaller than the scratch memory, or is split again.
            rows = max(1, SCRATCH_BYTES // max(1, part.target[0].nbytes))
            for first in range(0, part.shape[0], rows):
                target = part.target[first : first + rows]
                offset = part.offset + first * part.strides[0] * part.dtype.itemsize
                shape, strides = tuple(target.shape), part.strides
                if shape[0] == 1 and target.nbytes > SCRATCH_BYTES:
                    target, shape, strides = target[0], shape[1:], strides[1:]
                result += split([ExchangePart(target, part.dtype, offset, shape, strides)])
    return result


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Return the addresses of all parameters: another one invalidates what was recorded."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}


# --- recording ---


class Recording:
    """Copies that a model's loaders make. They hold for every layout of an update's bytes.

    Args:
        copies: all copies, none of which overlap.
        tensors: specs of the updates for which they hold.
        addresses: addresses of the parameters' memory (:func:`addresses`).
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
        self._last: tuple[tuple[Share | None, bool], Exchange | str] | None = None

    def fits(self, manifest: Manifest, model: torch.nn.Module) -> bool:
        """Check whether an update has the tensors, and the model the memory, for which this was recorded."""
        same = manifest.tensors is self.tensors or manifest.tensors == self.tensors
        return same and addresses(model) == self._addresses

    def exchange(self, layout: BucketLayout | ShardLayout, *, keep: bool) -> Exchange:
        """Return the exchange for a layout; the one before is forgotten.

        Args:
            keep: the update's memory will be the base of later differences.

        Raises:
            NotInPlaceError: the layout does not have what the loaders copy, or has no place for the old weights.
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
        places = Places(layout, self.tensors)
        parts = places.bind(self.copies)
        outside = sum(part.target.nbytes for part in parts if not part.has_room(keep))
        if outside > SCRATCH_BYTES:
            dtypes = [(copy.target.dtype, self.tensors[copy.source.tensor]) for copy in self.copies]
            name = next(spec.name for dtype, spec in dtypes if dtype != _dtype(spec))
            raise NotInPlaceError(
                f"{outside} bytes of old weights do not fit into the update's own memory, since {name}, for example, is sent in "
                f"another dtype than the engine uses{', and is the base of later differences' if keep else ''}"
            )
        return Exchange(parts, keep=keep, tied=self._tied_parts(places))

    def _tied_parts(self, places: Places) -> list[tuple[ExchangePart, ExchangePart]]:
        if self._tied is None:
            return []
        head, embedding = self._tied
        specs = self.tensors[head], self.tensors[embedding]
        if (specs[0].dtype, specs[0].shape) != (specs[1].dtype, specs[1].shape):
            raise NotInPlaceError(f"{HEAD} of the update differs from the embedding")
        nowhere = torch.empty(specs[0].shape, device="meta")
        pairs = []
        for piece, _ in places.pieces[head]:
            copy = Copy(nowhere[index_of(*piece.box)], Region(embedding, *piece.box))
            for box, part in places.parts(copy):
                # Within one piece of the output layer.
                (_, head_part), *_ = places.parts(Copy(part.target, Region(head, *box)))
                pairs.append((head_part, part))
        return pairs

    def unbind(self) -> None:
        """Release the views of staging memory that were made for the last update."""
        if self._last is not None and isinstance(self._last[1], Exchange):
            self._last[1].unbind()


class Places:
    """Places of slices in an update's bytes.

    Attributes:
        pieces: (slice without gaps, its first byte), by tensor.
    """

    def __init__(self, layout: BucketLayout | ShardLayout, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = tensors
        self.pieces: dict[int, list[tuple[Region, int]]] = defaultdict(list)
        for piece, start in layout.pieces():
            self.pieces[piece.tensor].append((piece, start))

    def bind(self, copies: Iterable[Copy]) -> list[ExchangePart]:
        """Return all parts of the copies in the order of an update's bytes."""
        parts = [part for copy in copies for _, part in self.parts(copy)]
        return sorted(parts, key=lambda part: part.offset)

    def parts(self, copy: Copy) -> Iterator[tuple[Box, ExchangePart]]:
        """Yield a copy's parts, one for each piece that the source's slice intersects, with the intersections.

        Raises:
            NotInPlaceError: the pieces do not cover the slice, or are not aligned to their dtype.
        """
        source, dtype = copy.source, _dtype(self._tensors[copy.source.tensor])
        left = source.volume
        for piece, start in self.pieces[source.tensor]:
            common = overlap(*source.box, *piece.box)
            if common is None:
                continue
            offsets, sizes = common
            left -= math.prod(sizes)
            strides = tuple(math.prod(piece.sizes[dim + 1 :]) for dim in range(len(sizes)))
            first = sum(map(mul, minus(offsets, piece.offsets), strides))
            if start % dtype.itemsize:
                raise NotInPlaceError("a tensor of the update is not aligned to its dtype")
            target = copy.target[index_of(minus(offsets, source.offsets), sizes)]
            yield common, ExchangePart(target, dtype, start + first * dtype.itemsize, sizes, strides)
        if left:
            raise NotInPlaceError(f"the update has not all of {self._tensors[source.tensor].name} that is loaded")


def learn(
    model: torch.nn.Module,
    vllm_config: Any,
    tensors: Sequence[TensorSpec],
    layout: BucketLayout | ShardLayout,
    staging: Tensor,
    changed_apart: Callable[[set[int]], str | None],
) -> Recording:
    """Record how the model's loaders distribute an update that vLLM's reload has just loaded. The engine must be paused.

    Args:
        staging: the update's bytes.
        changed_apart: returns the name of a tensor that the reload has changed and that is in none of the storages with these
            addresses; None if there is none.

    Raises:
        NotInPlaceError: the weights in use are not copies of parts of the update.
    """
    _require_plain(model, vllm_config)
    try:
        recorder = observe(model, vllm_config, tensors)
    except Exception as error:
        # Whatever a loader cannot do without memory: the reload can load this model, and this cannot.
        raise NotInPlaceError(f"{type(error).__name__}: {error}") from error
    tied = _tied(vllm_config, tensors)
    # The output layer equals the embedding, as Exchange.run checks, and is loaded into the same memory or not at all.
    copies = distinct(copy for copy in _copies(recorder, tensors) if tied is None or copy.source.tensor != tied[0])
    _require_complete(model, copies, [_in_use(part, recorder) for part in recorder.zeros])
    if (name := changed_apart({copy.target.untyped_storage().data_ptr() for copy in copies})) is not None:
        raise NotInPlaceError(f"{name} is computed from weights")
    for part in Places(layout, tensors).bind(copies):
        # What the kernels use may have been reordered or padded after loading; then it differs from what the loader copied.
        if not torch.equal(part.target, part.source(staging).to(part.target.dtype)):
            raise NotInPlaceError("the weights in use are not in the order of the checkpoint")
    return Recording(copies, tensors, addresses(model), tied)


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
        parts = as_slices(view.expand(target.shape), recorder.sources[number], _in_use(target, recorder))
        if parts is None:
            raise NotInPlaceError(
                f"the loader of {recorder.name(target)} does not copy a slice of {tensors[number].name}"
            )
        for box, part in parts:
            yield Copy(part, Region(number, *box))


def _in_use(target: Tensor, recorder: Recorder) -> Tensor:
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


def _tied(vllm_config: Any, tensors: Sequence[TensorSpec]) -> tuple[int, int] | None:
    """Return the numbers of an output layer and of the embedding in whose place vLLM does not use it."""
    if not getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False):
        return None
    head = [number for number, spec in enumerate(tensors) if spec.name == HEAD]
    embedding = [number for number, spec in enumerate(tensors) if spec.name.endswith(EMBEDDINGS)]
    return (head[0], embedding[0]) if head and embedding else None


def _dtype(spec: TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)
