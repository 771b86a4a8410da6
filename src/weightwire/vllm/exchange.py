"""Exchange of a model's weights with those of an update in staging memory, which holds the old weights afterwards.

So a commit can be undone without another copy of the model. On CUDA with Triton one kernel exchanges the parts whose bytes both
sides have in the same order, which are nearly all: it reads and writes every byte once. Others, and other devices, take three
copies through scratch memory. If the memory is to be the base of later differences, the new weights are copied back into it when
the commit is settled.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weightwire.digest import has_triton
from weightwire.staging import ALIGNMENT, ROW_BYTES
from weightwire.vllm import contract
from weightwire.vllm.checkpoint import require_equal_head

log = logging.getLogger(__name__)

SCRATCH_BYTES = 64 * 2**20
"""Memory through which parts are exchanged that the kernel does not exchange. It is allocated once."""
SWAP_BYTES = 2**30
"""Size of a group that the kernel exchanges: an exchange that stops leaves those after it as they were."""


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
            "no kernel can exchange weights on %s; each update makes three copies instead, and pauses longer", device
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
        self._parts, self._keep, self._tied = split_large(merge_adjacent(parts)), keep, tied
        # A worker may load nothing of an update.
        device = self._parts[0].target.device if self._parts else torch.device("cpu")
        self._kernel = swap_kernel(device)
        copied = sum(part.target.nbytes + ALIGNMENT for part in self._parts if not self._swaps(part))
        self._scratch = torch.empty(min(copied, SCRATCH_BYTES), dtype=torch.uint8, device=device)
        # By the number of a part whose old weights do not fit into its source's bytes: few, or Recording would have refused.
        self._separate: dict[int, Tensor] = {}
        self._staging_address = 0
        self._groups: list[_KernelGroup | _CopyGroup] = []
        self._changed_groups: list[_KernelGroup | _CopyGroup] = []

    def bind(self, staging: Tensor) -> None:
        """Prepare a run for staging memory, which need not have its content yet: the engine need not be paused for it."""
        # Views are made once: the receiver keeps its memory from one update to the next.
        if self._staging_address != staging.data_ptr():
            self._staging_address = staging.data_ptr()
            self._groups = [*self._kernel_groups(staging), *self._copy_groups(staging)]

    @torch.no_grad()
    def run(self, staging: Tensor) -> None:
        """Write the new weights into the parameters, and the old ones into the staging memory."""
        self._changed_groups = []
        # Loaders drop an output layer that the model shares with its embedding; a different one must not be lost.
        for head, embedding in self._tied:
            require_equal_head(head.source(staging), embedding.source(staging))
        self.bind(staging)
        for group in self._groups:
            # Before its exchange: a group that fails has changed some of its parameters.
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
        for group in self._groups:
            group.refill()

    def unbind(self) -> None:
        """Release the views of staging memory that were made for the last update."""
        self._staging_address, self._groups, self._changed_groups = 0, [], []

    def _swaps(self, part: ExchangePart) -> bool:
        return self._kernel is not None and part.dense and part.target.dtype == part.dtype

    def _kernel_groups(self, staging: Tensor) -> Iterator[_KernelGroup]:
        pairs: list[tuple[Tensor, Tensor]] = []
        size = 0
        for part in filter(self._swaps, self._parts):
            if pairs and size + part.target.nbytes > SWAP_BYTES:
                yield _KernelGroup(pairs, self._kernel)  # type: ignore[arg-type]
                pairs, size = [], 0
            pairs.append((part.target, part.source(staging)))
            size += part.target.nbytes
        if pairs:
            yield _KernelGroup(pairs, self._kernel)  # type: ignore[arg-type]

    def _copy_groups(self, staging: Tensor) -> Iterator[_CopyGroup]:
        group, used = _CopyGroup(), 0
        kind: tuple[torch.dtype, torch.dtype] | None = None
        for index, part in enumerate(self._parts):
            if self._swaps(part):
                continue
            size = part.target.numel() * part.target.dtype.itemsize
            if group.targets and (used + size > SCRATCH_BYTES or kind != (part.target.dtype, part.dtype)):
                yield group
                group, used = _CopyGroup(), 0
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


class _KernelGroup:
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


class _CopyGroup:
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
        for destinations, sources in (
            (self._scratch, self.targets),
            (self.targets, self._sources),
            (self._saved, self._scratch),
        ):
            torch._foreach_copy_(destinations, sources)
            self._steps += 1

    def restore(self) -> None:
        """Write the old weights back, after an exchange that is complete or has stopped at any of its copies."""
        if self._steps == 3:
            torch._foreach_copy_(self.targets, self._saved)
        elif self._steps:  # the last group alone: the next one would have overwritten the scratch memory
            torch._foreach_copy_(self.targets, self._scratch)

    def refill(self) -> None:
        """Write the new weights into their sources; those of another dtype were saved elsewhere, and have not changed."""
        if self.targets[0].dtype == self._sources[0].dtype:
            torch._foreach_copy_(self._sources, self.targets)


def merge_adjacent(parts: Iterable[ExchangePart]) -> list[ExchangePart]:
    """Merge parts that are adjacent in a parameter and in the update: gate and up of an expert, layers of one tensor."""
    merged: list[ExchangePart] = []
    for part in parts:
        last = merged[-1] if merged else None
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
                merged[-1] = ExchangePart(union, part.dtype, last.offset, (count,), (1,))
                continue
        merged.append(part)
    return merged


def split_large(parts: Iterable[ExchangePart]) -> list[ExchangePart]:
    """Split parts that exceed the scratch memory."""
    small_parts: list[ExchangePart] = []
    for part in parts:
        if part.target.nbytes <= SCRATCH_BYTES:
            small_parts.append(part)
            continue
        # By rows: a row of any parameter is smaller than the scratch memory, or is split again.
        rows = max(1, SCRATCH_BYTES // part.target[0].nbytes)
        for first in range(0, part.shape[0], rows):
            target = part.target[first : first + rows]
            offset = part.offset + first * part.strides[0] * part.dtype.itemsize
            shape, strides = tuple(target.shape), part.strides
            if shape[0] == 1 and target.nbytes > SCRATCH_BYTES:
                target, shape, strides = target[0], shape[1:], strides[1:]
            small_parts += split_large([ExchangePart(target, part.dtype, offset, shape, strides)])
    return small_parts
