"""Random numbers of the simulated device: one CPU generator of its own beside PyTorch's default one.

A generator of device type npu needs C++. A CPU generator that only npu operators draw from behaves the same: seeding or
restoring one device's state leaves the other's alone, and equal states give equal draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_generator = torch.Generator("cpu")


def generator() -> torch.Generator:
    """The generator that npu operators of this process draw from."""
    return _generator


def with_npu_random_state(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator that draws from the CPU's default generator and takes no other, as if that were the npu's."""
    default = torch.default_generator
    saved = default.get_state()
    default.set_state(_generator.get_state())
    try:
        return call(*args, **kwargs)
    finally:
        _generator.set_state(default.get_state())
        default.set_state(saved)
