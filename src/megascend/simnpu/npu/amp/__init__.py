"""``torch.npu.amp``: PyTorch's device-neutral automatic mixed precision, bound to the device type ``npu``."""

from megascend.simnpu.npu.amp import common as common
from megascend.simnpu.npu.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from megascend.simnpu.npu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]
