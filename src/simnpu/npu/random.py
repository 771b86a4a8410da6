"""Random states of the devices, each of which has its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from simnpu.npu.devices import device_index
from simnpu.random import Generator as Generator
from simnpu.random import generator
from simnpu.visible import device_count

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

Device = torch.device | str | int


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    """State of the device's generator, a ByteTensor on the CPU."""
    return generator(device_index(device)).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Device = "npu") -> None:
    generator(device_index(device)).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator alike."""
    for index in range(device_count()):
        generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's generator from the system's entropy."""
    generator().seed()


def seed_all() -> None:
    """Seed every device with one random number."""
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    return generator().initial_seed()
