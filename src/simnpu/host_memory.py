"""Pinned host memory beside the simulated device: ordinary memory that answers True to ``is_pinned()``.

PyTorch asks the device for an allocator of pinned memory, which only C++ can give. Here ``pin_memory()`` clones, and the
factories' ``pin_memory=True`` allocates as usual; both leave a mark on the storage.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

MARK = "_npu_pinned"
FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "tensor", "empty_like", "zeros_like", "ones_like")


def install() -> None:
    """Let torch's factories take ``pin_memory=True``."""
    for name in FACTORIES:
        replace_function(name, _pinning)


def _pinning(factory: Any) -> Any:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Tensor:
        if not kwargs.pop("pin_memory", False):
            return factory(*args, **kwargs)
        created = factory(*args, **kwargs)
        if not created.is_cpu:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return marked(created)

    return create


def pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """aten::_pin_memory of a CPU tensor."""
    return marked(tensor.clone())


def is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    """aten::is_pinned of a CPU tensor."""
    return hasattr(tensor.untyped_storage(), MARK)


def marked(tensor: Tensor) -> Tensor:
    setattr(tensor.untyped_storage(), MARK, True)
    return tensor


CPU_KERNELS = {"_pin_memory": pin_memory, "is_pinned": is_pinned}


def replace_function(name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    """Put ``wrap(torch.NAME)`` in the place of ``torch.NAME``.

    ``with torch.device(...)`` knows the factories by identity, from a list that it makes once: the originals, which the
    wrappers call. TorchScript compiles calls of what it knows by identity, of which both are.
    """
    original = getattr(torch, name)
    _device_constructors()  # cached
    replacement = wrap(original)
    for function in (original, replacement):
        _builtins._register_builtin(function, f"aten::{name}")
    setattr(torch, name, replacement)


_libraries: list[torch.library.Library] = []


def install_reducer() -> None:
    """Let the reducer of ``DistributedDataParallel(find_unused_parameters=True)``, transformers' default, find pinned memory.

    It allocates in C++, out of reach of what Python calls. Once such a model is wrapped, ``aten::empty_strided`` of the CPU is a
    kernel in Python; that costs every call of it some microseconds, so no other program pays for it. Idempotent.
    """
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
    return marked(created) if pin_memory else created
