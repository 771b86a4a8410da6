"""Random numbers of the simulated devices: a CPU generator for each, beside PyTorch's default one.

A generator of device type npu needs C++. A CPU generator that only one device's operators draw from behaves the same:
seeding or restoring one device's state leaves the others' and the CPU's alone, and equal states give equal draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from simnpu.visible import CURRENT, index_of


class Generator(torch._C.Generator):
    """A generator of a simulated device: a CPU generator that names the device as its own."""

    def __new__(cls, device: Any = "npu") -> Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    def __init__(self, device: Any = "npu") -> None:
        self._index: int = device if isinstance(device, int) else index_of(torch.device(device))

    @property
    def device(self) -> torch.device:
        return torch.device("npu", self._index)


_generators: dict[int, Generator] = {}


def generator(index: int | None = None) -> Generator:
    """Return the generator that a device's operators draw from; by default the current device's."""
    index = CURRENT.index if index is None else index
    if index not in _generators:
        _generators[index] = Generator(index)
    return _generators[index]


def with_npu_random_state(index: int, call: Callable[[], Any]) -> Any:
    """Run an operator that draws from the CPU's default generator and takes no other, as if that were the device's."""
    default, device_generator = torch.default_generator, generator(index)
    saved = default.get_state()
    default.set_state(device_generator.get_state())
    try:
        return call()
    finally:
        device_generator.set_state(default.get_state())
        default.set_state(saved)
