"""Stacked copies of one call's adapters in the model's precision, with views for fused layers; and a pool of stacks."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megascend.training.batch.packing import round_up
from megascend.training.batch.step_shapes import next_power_of_two
from megascend.training.kernels.host_copy import to_device
from megascend.training.lora.adapter import Adapter
from megascend.training.lora.layout import ShapeGroup

RANK_MULTIPLE = 8  # grouped kernels need rows of a multiple of 16 bytes


class StackedFactors(NamedTuple):
    """One shape group's factors of all adapters of a call, and their gradient buffers; or views of them.

    Attributes:
        a, a_grads: [layers, adapters, experts, in, slices * rank], the first in the model's precision, the second float32. In
            memory ``in`` is innermost, as grouped kernels need it, except for embeddings, which read rows.
        b, b_grads: [layers, adapters, experts, slices * rank, out]. B includes the adapter's scaling and is zero outside
            the output rows of a slice.
    """

    a: Tensor
    a_grads: Tensor
    b: Tensor
    b_grads: Tensor


@dataclass(frozen=True)
class StackedPart:
    """Unit of copying between an adapter and the stack: four views of equal shapes."""

    values: Tensor
    grads: Tensor
    stack: Tensor
    stack_grads: Tensor


class StackedAdapters:
    """Copies of adapters' factors, padded with zeros to one rank.

    Rows that pad a rank, and slices that an adapter does not target, are zero in both A and B; their gradients are then zero,
    too, so they need no mask. ``None`` among the adapters is the base model.

    Attributes:
        adapters: owners of the factors.
        dropouts: float32 [adapters] on the device, their dropout.
        rank: rank that all factors are padded to.

    Args:
        rank: default: the smallest that grouped kernels accept for these adapters.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        shape_groups: Sequence[ShapeGroup],
        dtype: torch.dtype,
        device: torch.device,
        rank: int | None = None,
    ) -> None:
        self._shape_groups, self._device = shape_groups, device
        self.rank = common_rank(adapters) if rank is None else rank
        self.stacks = [self._allocate(shape_group, len(adapters), dtype) for shape_group in shape_groups]
        self._blocks = [
            [row_blocks(fused_slice.local_rows) for fused_slice in shape_group.first.slices]
            for shape_group in shape_groups
        ]
        # Views of memory that never moves, cached because every layer and micro batch asks for them.
        self._views: dict[tuple[int, int, int | str | None], StackedFactors] = {}
        self._set_adapters(adapters)

    def assign(self, adapters: Sequence[Adapter | None]) -> None:
        """Switch to other adapters: the same number, none of a higher rank."""
        self._set_adapters(adapters)
        for stack in self.stacks:  # clear the previous adapters' values, which these may not overwrite completely
            stack.a.zero_()
            stack.b.zero_()

    @property
    def bytes(self) -> int:
        """Memory of factors and gradients."""
        return sum(tensor.numel() * tensor.element_size() for stack in self.stacks for tensor in stack)

    def _set_adapters(self, adapters: Sequence[Adapter | None]) -> None:
        self.adapters = tuple(adapters)
        # B's by the scaling that is included in the stack's B.
        self._a_parts: list[StackedPart] = []
        self._b_parts: defaultdict[float, list[StackedPart]] = defaultdict(list)
        for index, adapter in enumerate(adapters):
            if adapter is not None:
                self._add_parts(index, adapter)
        rates = [0.0 if adapter is None else adapter.lora.dropout for adapter in adapters]
        self.dropouts = to_device(torch.tensor(rates), self._device)

    def _allocate(self, shape_group: ShapeGroup, adapters: int, dtype: torch.dtype) -> StackedFactors:
        target, device = shape_group.first, self._device
        lead = (len(shape_group.target_modules), adapters, target.experts)
        inner = len(target.slices) * self.rank

        # Both layouts keep the dimension contiguous that the product reads row by row: an embedding looks up rows of
        # A, a linear layer multiplies by A with its input innermost.
        def zeros(dtype: torch.dtype) -> Tensor:
            if target.is_embedding:
                return torch.zeros(*lead, target.in_features, inner, dtype=dtype, device=device)
            return torch.zeros(*lead, inner, target.in_features, dtype=dtype, device=device).mT

        # Gradients are always fp32: they are sums over the micro batches of a call.
        a, a_grads = zeros(dtype), zeros(torch.float32)
        b = torch.zeros(*lead, inner, target.out_features, dtype=dtype, device=device)
        return StackedFactors(a, a_grads, b, torch.zeros(b.shape, device=device))

    def fill(self) -> None:
        """Copy the adapters' current values in and zero the gradients."""
        for stack in self.stacks:
            stack.a_grads.zero_()
            stack.b_grads.zero_()
        # foreach operators refuse empty lists, which adapters of none of these layers would give.
        if self._a_parts:
            # One launch for hundreds of small copies, which also rounds to the model's precision.
            torch._foreach_copy_([part.stack for part in self._a_parts], [part.values for part in self._a_parts])
        for scaling, parts in self._b_parts.items():
            for part in parts:
                # Scaled in fp32, and rounded once.
                torch.mul(part.values, scaling, out=part.stack)

    def collect(self) -> None:
        """Add the stack's gradients to the adapters'."""
        for scaling, parts in ((1.0, self._a_parts), *self._b_parts.items()):
            if parts:
                # B in the stack includes the scaling, so the adapter's gradient is the stack's times the scaling.
                torch._foreach_add_([part.grads for part in parts], [part.stack_grads for part in parts], alpha=scaling)
        for adapter in self.adapters:
            if adapter is not None:
                adapter.accumulated = True

    def _add_parts(self, index: int, adapter: Adapter) -> None:
        b_parts = self._b_parts[adapter.lora.scaling]
        pairs = zip(adapter.views(adapter.values.detach()), adapter.views(adapter.grads), strict=True)
        for (span, values), (_, grads) in pairs:
            number, stack = span.shape_group, self.stacks[span.shape_group]
            # A transposed: the stack stores it with its input innermost.
            factors = (stack.a.mT, stack.a_grads.mT) if span.factor == "a" else (stack.b, stack.b_grads)
            stack_slices, grad_slices = (self._slices(number, factor, index, adapter.lora.rank) for factor in factors)
            if span.factor == "a":
                self._a_parts.append(StackedPart(values, grads, stack_slices, grad_slices))
                continue
            # B of a slice covers its rows of the fused output only.
            for slice_number, blocks in enumerate(self._blocks[number]):
                for block in blocks:
                    # Outside its rows a slice's gradient is undefined and never read.
                    tensors = (values, grads, stack_slices[:, :, slice_number], grad_slices[:, :, slice_number])
                    b_parts.append(StackedPart(*(block.view(tensor) for tensor in tensors)))

    def factors(self, shape_group: int, layer: int, index: int | None) -> StackedFactors:
        """Return (A, its gradients, B, its gradients) of one layer: [adapters * experts, ...], or of one adapter."""
        key = (shape_group, layer, index)
        if key not in self._views:
            selection = slice(None) if index is None else slice(index, index + 1)
            views = (tensor[layer, selection].flatten(0, 1) for tensor in self.stacks[shape_group])
            self._views[key] = StackedFactors(*views)
        return self._views[key]

    def factors_of_experts(self, shape_group: int, layer: int) -> StackedFactors:
        """Return (A, its gradients, B, its gradients) of a layer's experts: [experts, adapters, ...], the order of their rows."""
        key = (shape_group, layer, "experts")
        if key not in self._views:
            self._views[key] = StackedFactors(*(tensor[layer].transpose(0, 1) for tensor in self.stacks[shape_group]))
        return self._views[key]

    def _slices(self, shape_group: int, factor: Tensor, index: int, rank: int) -> Tensor:
        """View one adapter's rows [layers, experts, slices, rank, x] of [layers, adapters, experts, slices * rank, x]."""
        count = len(self._shape_groups[shape_group].first.slices)
        return factor[:, index].unflatten(-2, (count, self.rank))[..., :rank, :]


def common_rank(adapters: Sequence[Adapter | None]) -> int:
    """Return the rank to pad to: the largest; with several adapters, rounded up to a multiple that grouped kernels accept."""
    largest = max((adapter.lora.rank for adapter in adapters if adapter is not None), default=1)
    return largest if len(adapters) == 1 else round_up(largest, RANK_MULTIPLE)


@dataclass(frozen=True)
class RowBlocks:
    """``count`` ascending blocks of ``length`` rows, which start ``step`` rows apart."""

    start: int
    length: int
    step: int
    count: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return these rows of the last dimension of ``tensor``: [..., count, length], a view."""
        stop = self.start + (self.count - 1) * self.step + self.length
        return tensor[..., self.start : stop].unfold(-1, self.length, self.step)


def row_blocks(rows: Tensor) -> list[RowBlocks]:
    """Describe ascending rows, int64 [n], by few blocks: q's rows in Megatron's fused layer are one for any number of groups."""
    if not len(rows):
        return []
    gaps = rows.diff()
    if (gaps < 1).any():
        raise ValueError("rows of a slice must be ascending")
    ends = [*(gaps > 1).nonzero().flatten().tolist(), len(rows) - 1]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    blocks: list[RowBlocks] = []
    for first, end in zip(firsts, ends, strict=True):
        start, length = int(rows[first]), end - first + 1
        last = blocks[-1] if blocks else None
        # Two blocks of one length define the step; later ones must continue it.
        if last is not None and length == last.length and last.count == 1:
            blocks[-1] = RowBlocks(last.start, length, start - last.start, 2)
        elif last is not None and length == last.length and start == last.start + last.count * last.step:
            blocks[-1] = RowBlocks(last.start, length, last.step, last.count + 1)
        else:
            blocks.append(RowBlocks(start, length, length, 1))
    return blocks


class StackPool:
    """Stacks of the last calls, which keep their memory while the adapters in them change.

    Args:
        limit: stacks kept; the least recently used is dropped.
        on_drop: called with a dropped stack before its memory is freed; for captured steps, which read factors and add gradients
            by address. Numbers and ranks of adapters are then rounded up to powers of two, which keep the number of stacks, and
            with it of captured graphs, small; slots that a call does not need are empty.
    """

    def __init__(
        self,
        shape_groups: Sequence[ShapeGroup],
        dtype: torch.dtype,
        device: torch.device,
        limit: int = 1,
        on_drop: Callable[[StackedAdapters], None] | None = None,
    ) -> None:
        self._shape_groups, self._dtype, self._device = shape_groups, dtype, device
        self._limit, self._on_drop = limit, on_drop
        self._stacks: OrderedDict[tuple[int, int], StackedAdapters] = OrderedDict()

    def slots(self, adapters: int) -> int:
        """Return the number of slots in the stack for a call of so many adapters."""
        return adapters if self._on_drop is None else next_power_of_two(adapters)

    def fill(self, adapters: Sequence[Adapter | None]) -> StackedAdapters:
        """Return the stack for a call of ``adapters``, which are first in it, in their order, with their current values."""
        adapters = (*adapters, *[None] * (self.slots(len(adapters)) - len(adapters)))
        rank = common_rank(adapters)
        if self._on_drop is not None:
            rank = max(RANK_MULTIPLE, next_power_of_two(rank))
        key = len(adapters), rank
        if key not in self._stacks:
            while len(self._stacks) >= self._limit:
                self._drop(next(iter(self._stacks)))  # before another is allocated
            self._stacks[key] = StackedAdapters(adapters, self._shape_groups, self._dtype, self._device, rank=rank)
        self._stacks.move_to_end(key)
        stack = self._stacks[key]
        if stack.adapters != adapters:
            stack.assign(adapters)
        # In every call: steps and loads change the adapters' fp32 values in between.
        stack.fill()
        return stack

    def collect(self) -> None:
        """Add the gradients of the last call to those of its adapters."""
        next(reversed(self._stacks.values())).collect()

    def forget(self, adapter: Adapter) -> None:
        """Remove every copy of an adapter."""
        for key in [key for key, stack in self._stacks.items() if adapter in stack.adapters]:
            if self._on_drop is None:
                self._drop(key)
            else:
                # Emptied, not dropped: captured steps still read its memory.
                self._stacks[key].assign([None] * key[0])

    def _drop(self, key: tuple[int, int]) -> None:
        stack = self._stacks.pop(key)
        if self._on_drop is not None:
            self._on_drop(stack)

    @property
    def bytes(self) -> int:
        """Memory of all stacks."""
        return sum(stack.bytes for stack in self._stacks.values())
