"""``torch_npu.npu.utils``: what programs import from there rather than from ``torch.npu``."""

from __future__ import annotations

import math

import torch

from simnpu.identity import SIMULATED_VERSION
from simnpu.identity import soc_version as get_soc_version
from simnpu.npu.devices import current_device, is_bf16_supported, set_device, synchronize
from simnpu.npu.memory import ipc_collect
from simnpu.npu.settings import clear_npu_overflow_flag, get_npu_overflow_flag

__all__ = [
    "clear_npu_overflow_flag",
    "current_device",
    "get_cann_version",
    "get_npu_overflow_flag",
    "get_soc_version",
    "ipc_collect",
    "is_bf16_supported",
    "is_support_inf_nan",
    "npu_check_overflow",
    "set_device",
    "synchronize",
]


def get_cann_version(module: str = "CANN") -> str:
    """Version of the toolkit's stand-in, whatever the module."""
    return SIMULATED_VERSION


def is_support_inf_nan() -> bool:
    """Infinities and NaN appear in results, as on a 910B."""
    return True


def npu_check_overflow(grad: torch.Tensor | float) -> bool:
    """Check whether the sum of a gradient is not finite."""
    return not math.isfinite(float(grad.float().sum()) if isinstance(grad, torch.Tensor) else grad)


def __getattr__(name: str) -> object:
    from simnpu.errors import missing

    raise missing(name, "torch_npu.npu.utils")
