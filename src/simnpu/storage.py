"""``untyped_storage()`` of npu tensors: creating and resizing, which PyTorch leaves to a device's C++ code.

The memory behind a storage cannot grow. ``resize_(0)``, by which Megatron frees an activation that it will recompute,
therefore keeps the memory but overwrites it, so that whoever reads it too early gets NaN; ``resize_`` back up to the
original size makes it usable again. More is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from simnpu import allocations
from simnpu.memory import cpu_view, npu_view
from simnpu.visible import index_of

POISON = 0xFF  # as floating point of every width: NaN; as signed integers: -1
LOGICAL_SIZE = "_npu_logical_size"  # attribute of a resized storage; PyTorch keeps its Python object as long as itself


def install() -> None:
    """Teach ``torch.UntypedStorage`` about npu storages. CPU storages behave as before. Idempotent."""
    cls: Any = torch.UntypedStorage
    if hasattr(cls.resize_, "__simnpu__"):
        return
    new, resize, nbytes = cls.__new__, cls.resize_, cls.nbytes

    def __new__(kind: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "npu":
            return new(kind, *args, **kwargs)
        if len(args) > 1 or (args and not isinstance(args[0], int)):
            raise TypeError("an npu storage is created from a number of bytes")
        memory = torch.empty(args[0] if args else 0, dtype=torch.uint8)
        return npu_view(memory, index_of(torch.device(device))).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        return _resize(self, size, nbytes(self)) if self.device.type == "npu" else resize(self, size)

    def logical_nbytes(self: Any) -> int:
        return self.__dict__.get(LOGICAL_SIZE, nbytes(self)) if self.__dict__ else nbytes(self)

    resize_.__simnpu__ = True  # type: ignore[attr-defined]
    cls.__new__, cls.resize_, cls.nbytes, cls.size = __new__, resize_, logical_nbytes, logical_nbytes


def _resize(storage: Any, size: int, capacity: int) -> Any:
    if size > capacity:
        raise RuntimeError(
            f"the simulated npu cannot grow a storage beyond the memory it was created with: asked for {size} bytes, "
            f"created with {capacity}"
        )
    if size < storage.nbytes():
        _bytes_of(storage)[size:].fill_(POISON)
    setattr(storage, LOGICAL_SIZE, size)
    allocations.resize(storage, size)
    return storage


def _bytes_of(storage: Any) -> torch.Tensor:
    whole = npu_view(torch.empty(0, dtype=torch.uint8), storage.device.index)
    return cpu_view(whole.set_(storage))
