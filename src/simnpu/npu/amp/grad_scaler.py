"""Loss scaling on the device type ``npu``."""

import torch

from simnpu.errors import missing

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("npu", ...)`` with torch_npu's order of arguments."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        if not dynamic:
            raise missing("GradScaler(dynamic=False)", "torch.npu.amp")
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
