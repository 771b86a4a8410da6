"""Random states of the device. All device indices share one generator, as they share one memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megascend.simnpu import device as simulated
from megascend.simnpu.npu.devices import device_count, device_index

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
    device_index(device)
    return simulated.generator().get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Device = "npu") -> None:
    device_index(device)
    simulated.generator().set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    simulated.generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed() -> None:
    """Seed the generator from the system's entropy."""
    simulated.generator().seed()


def seed_all() -> None:
    seed()


def initial_seed() -> int:
    return simulated.generator().initial_seed()
