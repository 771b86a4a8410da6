"""Small tensors made on the host, brought to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``; neither the host nor the device waits for the other.

    Of pageable memory a copy waits until all that was queued on the device is done: once a micro batch, that is the end
    of running ahead of it.

    Args:
        values: on the CPU.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
