"""Stacked adapters that keep their place in memory: captured steps read factors, and add gradients, by address."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from megascend.batch.step_shapes import next_power_of_two
from megascend.lora.adapter import Adapter
from megascend.lora.layout import ShapeGroup
from megascend.lora.stacked_adapters import RANK_MULTIPLE, StackedAdapters, common_rank


class StackPool:
    """A stack for each of a few sizes: numbers and ranks of adapters, rounded up to powers of two.

    Adapters come and go as contents of the stacks; places that a call does not need are empty.

    Args:
        limit: stacks kept; the one used longest ago makes room.
        on_drop: called with a stack that is given up, before its memory is free.
    """

    def __init__(
        self,
        shape_groups: Sequence[ShapeGroup],
        dtype: torch.dtype,
        device: torch.device,
        limit: int,
        on_drop: Callable[[StackedAdapters], None],
    ) -> None:
        self._shape_groups, self._dtype, self._device = shape_groups, dtype, device
        self._limit, self._on_drop = limit, on_drop
        self._stacks: OrderedDict[tuple[int, int], StackedAdapters] = OrderedDict()

    def take(self, adapters: Sequence[Adapter | None]) -> StackedAdapters:
        """The stack for a call of ``adapters``, which come first in it, in their order."""
        adapters = (*adapters, *[None] * (places(len(adapters)) - len(adapters)))
        key = len(adapters), padded_rank(adapters)
        stack = self._stacks.get(key)
        if stack is None:
            while len(self._stacks) >= self._limit:
                self._on_drop(self._stacks.popitem(last=False)[1])
            stack = StackedAdapters(adapters, self._shape_groups, self._dtype, self._device, rank=key[1])
            self._stacks[key] = stack
        self._stacks.move_to_end(key)
        if stack.adapters != adapters:
            stack.serve(adapters)
        return stack

    def forget(self, adapter: Adapter) -> None:
        """Remove every copy of an adapter."""
        for stack in self._stacks.values():
            if adapter in stack.adapters:
                stack.serve([None] * len(stack.adapters))

    @property
    def bytes(self) -> int:
        """Memory of all stacks."""
        return sum(stack.bytes for stack in self._stacks.values())


def places(adapters: int) -> int:
    """Adapters that the stack for a call of so many has room for."""
    return next_power_of_two(adapters)


def padded_rank(adapters: Sequence[Adapter | None]) -> int:
    """The rank of their stack: a power of two that grouped kernels take."""
    return max(RANK_MULTIPLE, next_power_of_two(common_rank(adapters)))
