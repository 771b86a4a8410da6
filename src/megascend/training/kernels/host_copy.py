"""Asynchronous copies of small tensors from the host to the device, and of results back to the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy CPU ``values`` to ``device`` without synchronizing."""
    if device.type == "cpu":
        return values
    # A copy from pageable memory would wait for all queued work of the device, so the host could not run ahead of it.
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of ``values`` to the host, which overlaps with the host's other work."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values.detach(), None
        if values.device.type != "cpu":
            # Page-locked: a copy to pageable memory would wait for the device.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values.detach(), non_blocking=True)
            self._arrived = torch.get_device_module(values.device).Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the copy and return the values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
