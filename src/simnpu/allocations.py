"""How many bytes of npu tensors live on each device, and how many did at most.

Counted when a tensor gets memory of its own and when its storage dies, which the storage's Python object lets us see:
PyTorch keeps that object as long as the storage. Memory that several storages share is counted for each.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_nbytes: Any = torch._C.StorageBase.nbytes  # type: ignore[attr-defined]  # not the logical size, see storage


class _Living(weakref.ref):
    """A storage, its place in the table, its device and its size."""

    __slots__ = ("index", "key", "size")

    key: int
    index: int
    size: int


_living: dict[int, _Living] = {}
_bytes: dict[int, int] = {}
_peak: dict[int, int] = {}


def add(tensor: torch.Tensor, index: int) -> None:
    """Count the memory of a new npu tensor."""
    storage = tensor.untyped_storage()
    size = _nbytes(storage)
    if not size:
        return
    living = _Living(storage, _remove)
    living.key, living.index, living.size = id(storage), index, size
    _living[living.key] = living
    now = _bytes[index] = _bytes.get(index, 0) + size
    if now > _peak.get(index, 0):
        _peak[index] = now


def resize(storage: Any, size: int) -> None:
    """Count a storage from now on as ``size`` bytes, as after ``resize_``."""
    if living := _living.get(id(storage)):
        _bytes[living.index] += size - living.size
        living.size = size
        _peak[living.index] = max(_peak[living.index], _bytes[living.index])


def allocated(index: int) -> int:
    """Bytes alive on a device. Counted anew, since two threads may have changed the running sum at once."""
    _bytes[index] = sum(living.size for living in list(_living.values()) if living.index == index)
    return _bytes[index]


def peak(index: int) -> int:
    """Return the most bytes alive on a device since :func:`reset_peak`."""
    return max(_peak.get(index, 0), allocated(index))


def reset_peak(index: int) -> None:
    _peak[index] = allocated(index)


def _remove(living: _Living) -> None:
    del _living[living.key]
    _bytes[living.index] -= living.size
