"""How many bytes of npu tensors live on each device, and how many did at most.

Counted when a tensor gets memory of its own and when its storage dies, which the storage's Python object lets us see:
PyTorch keeps that object as long as the storage. Memory that several storages share is counted for each.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_nbytes: Any = torch._C.StorageBase.nbytes  # type: ignore[attr-defined]  # not the logical size, see storage


class _LiveStorage(weakref.ref):
    """A storage, its place in the table, its device and its size."""

    __slots__ = ("index", "key", "size")

    key: int
    index: int
    size: int


_live: dict[int, _LiveStorage] = {}
_bytes: dict[int, int] = {}
_peak: dict[int, int] = {}


def add(tensor: torch.Tensor, index: int) -> None:
    """Count the memory of a new npu tensor."""
    storage = tensor.untyped_storage()
    size = _nbytes(storage)
    if not size:
        return
    storage_ref = _LiveStorage(storage, _remove)
    storage_ref.key, storage_ref.index, storage_ref.size = id(storage), index, size
    _live[storage_ref.key] = storage_ref
    now = _bytes[index] = _bytes.get(index, 0) + size
    if now > _peak.get(index, 0):
        _peak[index] = now


def resize(storage: Any, size: int) -> None:
    """Count a storage from now on as ``size`` bytes, as after ``resize_``."""
    if storage_ref := _live.get(id(storage)):
        _bytes[storage_ref.index] += size - storage_ref.size
        storage_ref.size = size
        _peak[storage_ref.index] = max(_peak[storage_ref.index], _bytes[storage_ref.index])


def allocated(index: int) -> int:
    """Return the bytes alive on a device, summed again: two threads may have changed the running sum at once."""
    _bytes[index] = sum(storage_ref.size for storage_ref in list(_live.values()) if storage_ref.index == index)
    return _bytes[index]


def peak(index: int) -> int:
    """Return the most bytes alive on a device since :func:`reset_peak`."""
    return max(_peak.get(index, 0), allocated(index))


def reset_peak(index: int) -> None:
    _peak[index] = allocated(index)


def _remove(storage_ref: _LiveStorage) -> None:
    del _live[storage_ref.key]
    _bytes[storage_ref.index] -= storage_ref.size
