"""Pinned memory for the reducer of ``DistributedDataParallel(find_unused_parameters=True)``, transformers' default.

The reducer allocates it in C++, where PyTorch asks the device for an allocator that only C++ can give (see
``host_memory``, which covers what Python calls). Once such a model is wrapped, ``aten::empty_strided`` of the CPU is a
kernel in Python. That costs every call of it some microseconds, so no other program pays for it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from simnpu import host_memory

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Make the reducers of npu models find pinned memory. Idempotent."""
    original = DistributedDataParallel.__init__
    if hasattr(original, "__simnpu__"):
        return

    @functools.wraps(original)
    def __init__(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, module, *args, **kwargs)
        if self.find_unused_parameters and self.device_type == "npu":
            allocate_in_python()

    __init__.__simnpu__ = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = __init__


def allocate_in_python() -> None:
    """Enter :func:`empty_strided` as the CPU's kernel of that name. Idempotent; for the rest of the process."""
    if _libraries:
        return
    aten = torch.library.Library("aten", "IMPL")
    assert aten.m is not None  # None only after the library was destroyed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # PyTorch's kernel, replaced
        aten.m.impl("empty_strided", "CPU", empty_strided)
    _libraries.append(aten)


def empty_strided(
    size: list[int],
    stride: list[int],
    *,
    dtype: torch.dtype | None = None,
    pin_memory: bool | None = None,
    **options: Any,
) -> Tensor:
    """aten::empty_strided of the CPU, by way of aten::empty, which has a kernel of its own.

    ``options`` are aten's ``device`` and ``layout``, which are the CPU and strided: others do not come here.
    """
    elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    memory = torch.empty(elements, dtype=dtype, device="cpu")
    created = torch.empty(0, dtype=memory.dtype, device="cpu").set_(memory.untyped_storage(), 0, size, stride)
    return host_memory.marked(created) if pin_memory else created
