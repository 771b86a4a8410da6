"""Pinned host memory beside the simulated device: ordinary memory that answers True to ``is_pinned()``.

PyTorch asks the device for an allocator of pinned memory, which only C++ can give. Here ``pin_memory()`` clones, and the
factories' ``pin_memory=True`` allocates as usual; both leave a mark on the storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
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
