"""Live and peak bytes of all tensors: the CPU counterpart of ``torch.cuda.max_memory_allocated``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorMemory(TorchDispatchMode):
    """Context that counts the live storages of tensors that operators read or write, each once.

    A storage within another one (``torch.frombuffer``) is a part of that.

    Temporaries inside an operator, and communication libraries' own buffers, are not seen. Storages of other devices than
    ``device_type`` do not count.

    Attributes:
        allocated: bytes that are alive.
        peak: most bytes since the beginning or :meth:`reset_peak`.
        at_peak: with ``explain``, the live storages at the peak: ``{(operator, dtype, shape): bytes}``.
    """

    def __init__(self, device_type: str = "cpu", *, explain: bool = False) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self.at_peak: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._device_type, self._explain = device_type, explain
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._parts: set[int] = set()
        self._alive: dict[int, weakref.ref] = {}
        self._made_by: dict[int, tuple[str, str, tuple[int, ...]]] = {}

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        self.peak, self.at_peak = self.allocated, {}

    def __enter__(self) -> TensorMemory:
        self._resize = torch.UntypedStorage.resize_
        memory = self

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            storage_result = memory._resize(storage, size)  # FSDP2 frees and restores gathered parameters this way
            memory._measure(storage, ("resize_", "", (size,)))
            return storage_result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in _tensors((args, kwargs, result)):
            self._measure(value.untyped_storage(), (str(func), str(value.dtype), tuple(value.shape)))
        return result

    def _measure(self, storage: torch.UntypedStorage, made_by: tuple[str, str, tuple[int, ...]]) -> None:
        if storage.device.type != self._device_type:
            return
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._sizes[key] = 0
            self._made_by[key] = made_by
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            self._starts[key] = start
            if any(
                self._starts[other] <= start and end <= self._starts[other] + size
                for other, size in self._sizes.items()
            ):
                self._parts.add(key)
        size = 0 if key in self._parts else storage.nbytes()
        self.allocated += size - self._sizes[key]
        self._sizes[key] = size
        if self.allocated > self.peak:
            if self._explain and self.allocated > 1.002 * self.peak:
                self.at_peak = {}
                for storage_key, bytes_ in self._sizes.items():
                    self.at_peak[self._made_by[storage_key]] = self.at_peak.get(self._made_by[storage_key], 0) + bytes_
            self.peak = self.allocated

    def _forget(self, key: int) -> None:
        self.allocated -= self._sizes.pop(key, 0)
        self._alive.pop(key, None)
        self._made_by.pop(key, None)
        self._starts.pop(key, None)
        self._parts.discard(key)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the plain tensors among ``values``; of a sharded tensor, this rank's shard."""
    for value in tree_iter(values):
        local = getattr(value, "_local_tensor", value)
        if isinstance(local, Tensor) and type(local) in (Tensor, torch.nn.Parameter):
            yield local
