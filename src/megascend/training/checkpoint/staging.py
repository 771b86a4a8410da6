"""Staging: fast copies of device tensors to host memory, for which training waits when it saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascend.training.checkpoint.slices import TensorSlices
from weightwire.background import BackgroundThread

BLOCK = 2**28  # bytes; torch's allocator of page-locked memory rounds up to a power of two
# A view as another dtype must begin at a multiple of its size.
ALIGNMENT = 64


class Staging:
    """Host memory for one save, reused by the next.

    Copying to newly allocated memory is several times slower than to memory that has been used before, in particular to
    page-locked memory, which a GPU otherwise fills at the full speed of its bus.
    """

    def __init__(self, *, page_locked: bool) -> None:
        self._page_locked = page_locked
        self._blocks: list[Tensor] = []
        self._allocation: BackgroundThread | None = None

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate the memory that ``state`` will need, in the background."""
        # Two threads must not allocate blocks at once.
        self._wait_for_allocation()
        sizes = [_bytes(values) for values in _values(state)]
        self._allocation = BackgroundThread(self._carve, sizes, name="megascend-staging")
        self._allocation.start()

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its tensors in host memory, which are valid until the next call."""
        self._wait_for_allocation()
        blocks = iter(self._carve([_bytes(values) for values in _values(state)]))
        host_state: dict[str, Any] = {}
        devices = set()
        for name, tensor in state.items():
            if not isinstance(tensor, TensorSlices):
                host_state[name] = tensor
                continue
            host_state[name] = TensorSlices(tensor.shape, tensor.dtype, tensor.may_differ)
            for offsets, values in tensor.slices:
                target = next(blocks).view(values.dtype).view(values.shape)
                target.copy_(values.detach(), non_blocking=self._page_locked)
                devices.add(values.device)
                host_state[name].add(offsets, target)
        # Only now are the asynchronous copies complete.
        for device in devices:
            if self._page_locked and device.type != "cpu":
                torch.cuda.synchronize(device)
        return host_state

    def _wait_for_allocation(self) -> None:
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def _carve(self, sizes: list[int]) -> list[Tensor]:
        """Return a uint8 tensor of each size; allocates further blocks if needed, no larger than the remaining sizes."""
        tensors, block, offset = [], 0, 0
        remaining = sum(map(_aligned, sizes))
        for size in sizes:
            while block < len(self._blocks) and offset + size > len(self._blocks[block]):
                block, offset = block + 1, 0
            if block == len(self._blocks):
                self._blocks.append(self._allocate(max(size, min(BLOCK, remaining))))
                offset = 0
            tensors.append(_tensor_at(self._blocks[block], offset, size))
            offset += _aligned(size)
            remaining -= _aligned(size)
        return tensors

    def _allocate(self, size: int) -> Tensor:
        block = torch.empty(size, dtype=torch.uint8, pin_memory=self._page_locked)
        if not self._page_locked:
            block.zero_()  # the system allocates pages at their first write: now, not while training waits
        return block


def _values(state: dict[str, Any]) -> list[Tensor]:
    return [values for tensor in state.values() if isinstance(tensor, TensorSlices) for _, values in tensor.slices]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


def _tensor_at(block: Tensor, start: int, size: int) -> Tensor:
    """Return ``block[start:start + size]`` with a storage of that size: torch's writer copies tensors with larger storages."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(block.numpy(), dtype=torch.uint8, count=size, offset=start)
