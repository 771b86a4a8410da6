"""Small tensors made on the host, brought to the device, and results on their way back."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy CPU ``values`` to ``device``; neither waits for the other.

    From pageable memory a copy waits for all queued work of the device: once a micro batch, the host could not run ahead.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of ``values`` on the host, which is under way while the host prepares other work for the device."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values.detach(), None
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values.detach(), non_blocking=True)
            self._arrived = torch.get_device_module(values.device).Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """The values, once the device has got there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
