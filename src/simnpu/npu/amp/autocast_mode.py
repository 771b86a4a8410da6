"""Autocast on the device type ``npu``."""

import functools

import torch

__all__ = ["autocast", "custom_bwd", "custom_fwd"]

custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="npu")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="npu")


class autocast(torch.amp.autocast_mode.autocast):
    """``torch.autocast("npu", ...)``; float16 unless told otherwise, as in torch_npu."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
