"""``torch.npu`` (and ``torch_npu.npu``) of the simulated device.

``__all__`` is what ``transfer_to_npu`` merges into ``torch.cuda``.
"""

from __future__ import annotations

from typing import Any

import torch

from simnpu import device as simulated
from simnpu import identity
from simnpu.errors import PlatformError
from simnpu.npu import amp as amp
from simnpu.npu import memory as memory
from simnpu.npu import random as random
from simnpu.npu import utils as utils
from simnpu.npu.autocast_utils import (
    get_autocast_dtype,
    is_autocast_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from simnpu.npu.devices import (
    _is_in_bad_fork as _is_in_bad_fork,
)
from simnpu.npu.devices import (
    _lazy_call as _lazy_call,
)
from simnpu.npu.devices import (
    _lazy_init as _lazy_init,
)
from simnpu.npu.devices import (
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_amp_supported_dtype,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_bf16_supported,
    is_initialized,
    set_device,
    synchronize,
    utilization,
)
from simnpu.npu.memory import *  # noqa: F403
from simnpu.npu.mstx import mstx
from simnpu.npu.random import *  # noqa: F403
from simnpu.npu.settings import (
    CubeMathType,
    are_compatible_impl_enabled,
    clear_npu_overflow_flag,
    config,
    conv,
    disable_deterministic_with_backward,
    enable_deterministic_with_backward,
    get_device_limit,
    get_mm_bmm_format_nd,
    get_npu_overflow_flag,
    get_stream_limit,
    get_sync_debug_mode,
    is_jit_compile_false,
    matmul,
    reset_stream_limit,
    set_compile_mode,
    set_deterministic_level,
    set_device_limit,
    set_mm_bmm_format_nd,
    set_op_timeout_ms,
    set_option,
    set_stream_limit,
    set_sync_debug_mode,
    use_compatible_impl,
)
from simnpu.npu.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from simnpu.npu.types import TYPES as _TYPES

globals().update(_TYPES)
get_soc_version = identity.soc_version

default_generators: tuple[torch.Generator, ...] = tuple(map(simulated.generator, range(device_count())))


class SyncLaunchStream(Stream):
    """A stream whose operators are launched at once, as those of every simulated stream are."""


class NPUGraph:
    """Graph capture, which the simulated device does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise PlatformError("torch.npu.NPUGraph is not simulated by simnpu: run without graph capture")


def is_current_stream_capturing() -> bool:
    """False: there is no graph capture here."""
    return False


def __getattr__(name: str) -> object:
    from simnpu.errors import missing

    raise missing(name, "torch.npu")


__all__ = [
    "CubeMathType",
    "Event",
    "NPUGraph",
    "Stream",
    "StreamContext",
    "SyncLaunchStream",
    "are_compatible_impl_enabled",
    "can_device_access_peer",
    "clear_npu_overflow_flag",
    "config",
    "conv",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "disable_deterministic_with_backward",
    "enable_deterministic_with_backward",
    "get_amp_supported_dtype",
    "get_autocast_dtype",
    "get_device_capability",
    "get_device_limit",
    "get_device_name",
    "get_device_properties",
    "get_mm_bmm_format_nd",
    "get_npu_overflow_flag",
    "get_stream_limit",
    "get_sync_debug_mode",
    "init",
    "is_autocast_enabled",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_jit_compile_false",
    "matmul",
    "mstx",
    "reset_stream_limit",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "set_compile_mode",
    "set_deterministic_level",
    "set_device",
    "set_device_limit",
    "set_mm_bmm_format_nd",
    "set_op_timeout_ms",
    "set_option",
    "set_stream",
    "set_stream_limit",
    "set_sync_debug_mode",
    "stream",
    "synchronize",
    "use_compatible_impl",
    "utilization",
    *memory.__all__,
    *random.__all__,
    *_TYPES,
]
