"""Replacing functions of ``torch``, so that what knows them by identity still knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors


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
