"""Which devices this process sees, and which one each of its threads uses."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import torch

from simnpu import identity
from simnpu.errors import ConfigError
from simnpu.settings import DEVICES_VARIABLE

VISIBLE_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
DEVICE = "npu"


class CurrentDevice(threading.local):
    """The device that a thread uses where none is named: the first, until it sets another. The stream that it uses on each."""

    index = 0

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}  # by index; without one, the default stream


CURRENT = CurrentDevice()
_existing_devices: set[int] = (
    set()
)  # devices that were found to exist: their number is not read again at every operator


def device_count() -> int:
    """Devices that this process sees: those that ``ASCEND_RT_VISIBLE_DEVICES`` names, else all of the host."""
    text = os.environ.get(VISIBLE_VARIABLE)
    if text is None:
        return identity.device_count()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(name.isdigit() for name in names) or len(set(names)) != len(names):
        raise ConfigError(f"{VISIBLE_VARIABLE}={text!r}: expected numbers of devices, each once, separated by commas")
    if os.environ.get(DEVICES_VARIABLE) and any(int(name) >= identity.device_count() for name in names):
        raise ConfigError(
            f"{VISIBLE_VARIABLE}={text!r}: this host has {identity.device_count()} simulated devices "
            f"({DEVICES_VARIABLE}), numbered from 0"
        )
    return len(names)


def existing(index: int) -> int:
    """``index``, if there is such a device."""
    if not 0 <= index < device_count():
        raise RuntimeError(
            f"Invalid device ID. Set device {index}: this process sees {device_count()} simulated devices; "
            f"{DEVICES_VARIABLE} sets how many the host has, {VISIBLE_VARIABLE} which of them are visible"
        )
    _existing_devices.add(index)
    return index


def card(index: int) -> str:
    """Name the host's card behind a device of this process. A node of torchrun is a host."""
    names = os.environ.get(VISIBLE_VARIABLE)
    number = names.split(",")[index].strip() if names else index
    return f"{socket.gethostname()}, node {os.environ.get('GROUP_RANK', 0)}, card {number}"


def index_of(device: torch.device | None) -> int:
    """Return the index that a device argument of an operator stands for; without one, the current device's."""
    if device is None or device.index is None:
        return CURRENT.index
    return device.index if device.index in _existing_devices else existing(device.index)


def only_the_first_is_used() -> bool:
    """Check that no thread has used a device other than ``npu:0`` so far."""
    return _existing_devices <= {0}
