"""``torch.npu.amp``: PyTorch's device-neutral automatic mixed precision, bound to the device type ``npu``."""

from simnpu.npu.amp import common as common
from simnpu.npu.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from simnpu.npu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]
