"""What the simulated device calls itself, and how many there are. Imports no torch, so that ``npu-smi`` answers at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from simnpu.errors import ConfigError
from simnpu.settings import DEVICES_VARIABLE, NAME_VARIABLE

SIMULATED_NAME = "Simulated Ascend (CPU memory, simnpu)"
SIMULATED_VERSION = "0.0.0+simnpu"
"""Version of the driver and of CANN: older than any, so that a program which asks whether the card can do something that
came with a certain version (sharing memory between processes) hears that it cannot."""
DEFAULT_DEVICES = 8  # cards of an Ascend training node


@dataclass(frozen=True)
class Chip:
    """A chip that the device can be called after: its name in CANN, its number in torch_npu, and its cores."""

    name: str
    soc_version: int
    cube_cores: int
    vector_cores: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("Ascend910B1", 220, 24, 48),
        Chip("Ascend910B2", 221, 24, 48),
        Chip("Ascend910B2C", 222, 24, 48),
        Chip("Ascend910B3", 223, 20, 40),
        Chip("Ascend910B4", 224, 20, 40),
    )
}
GENERATION = CHIPS["Ascend910B1"]  # whose kernels are simulated, where the device keeps its own name


def chip() -> Chip | None:
    """Return the chip that ``SIMNPU_DEVICE_NAME`` names; None if it is not set."""
    name = os.environ.get(NAME_VARIABLE)
    if not name:
        return None
    model = CHIPS.get(name) or CHIPS.get(f"Ascend{name}")
    if model is None:
        raise ConfigError(f"{NAME_VARIABLE}={name!r}: expected one of {', '.join(CHIPS)}")
    return model


def device_name() -> str:
    """Return the chip's name if one is set; else one that cannot pass for hardware in a log or a benchmark."""
    model = chip()
    return model.name if model else SIMULATED_NAME


def soc_version() -> int:
    """torch_npu's number of the chip: that of a 910B unless a name is set."""
    return (chip() or GENERATION).soc_version


def device_count() -> int:
    """Devices of this host: ``SIMNPU_DEVICES``, else the number of local ranks, else 8."""
    settings = {
        DEVICES_VARIABLE: os.environ.get(DEVICES_VARIABLE),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE"),
    }
    for variable, text in settings.items():
        if text:
            if not text.isdigit() or int(text) < 1:
                raise ConfigError(f"{variable}={text!r}: expected a number of devices, 1 or more")
            return int(text)
    return DEFAULT_DEVICES
