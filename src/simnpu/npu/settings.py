"""Switches of the Ascend runtime. They select kernels that do not exist here, so they are kept and shown, not obeyed."""

from __future__ import annotations

import enum
import warnings
from typing import TYPE_CHECKING, Any

from simnpu.identity import GENERATION, chip

if TYPE_CHECKING:
    from simnpu.npu.streams import Stream


class Settings:
    """Settings of the program, for tests and for `doctor`."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.jit_compile = False
        self.deterministic_level = 0
        self.sync_debug_mode = 0
        self.mm_bmm_format_nd = True
        self.compatible_impl = False
        self.device_limits: dict[int, dict[str, int]] = {}
        self.stream_limits: dict[int, dict[str, int]] = {}


SETTINGS = Settings()


class Switches:
    """An object with attributes that can be set (``torch.npu.config.allow_internal_format = False``)."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"Switches({self.__dict__})"


config = Switches(allow_internal_format=False)
matmul = Switches(allow_hf32=False, cube_math_type=1)
conv = Switches(allow_hf32=True)


def set_option(option: dict[str, Any]) -> None:
    """Set options of the Ascend compiler, e.g. ``{"ACL_PRECISION_MODE": "must_keep_origin_dtype"}``."""
    if not isinstance(option, dict):
        raise TypeError(f"npu option must be a dict, got {type(option).__name__}")
    SETTINGS.options.update(option)


def set_compile_mode(jit_compile: bool = False) -> None:
    """Store whether kernels are compiled for each shape; there are no kernels to compile."""
    SETTINGS.jit_compile = bool(jit_compile)


def is_jit_compile_false() -> bool:
    return not SETTINGS.jit_compile


def set_deterministic_level(level: int) -> None:
    """Store the level; the simulated operators are deterministic at every level."""
    SETTINGS.deterministic_level = int(level)


class CubeMathType(enum.IntEnum):
    """Precision of matrix products; without effect, as products are the CPU's."""

    KEEP_DTYPE = 0
    ALLOW_FP32_DOWN_PRECISION = 1
    USE_FP16 = 2
    USE_HF32 = 3


SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Store the mode; nothing is reported, as every operator has finished when its call returns."""
    mode = SYNC_DEBUG_MODES.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in SYNC_DEBUG_MODES.values():
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    SETTINGS.sync_debug_mode = mode


def get_sync_debug_mode() -> int:
    return SETTINGS.sync_debug_mode


def set_mm_bmm_format_nd(is_nd: bool = True) -> None:
    """Store the setting; there are no private formats here."""
    SETTINGS.mm_bmm_format_nd = bool(is_nd)


def get_mm_bmm_format_nd() -> bool:
    return SETTINGS.mm_bmm_format_nd


def use_compatible_impl(is_compatible: bool) -> None:
    """Store the setting; there is one implementation here, PyTorch's own."""
    SETTINGS.compatible_impl = bool(is_compatible)


def are_compatible_impl_enabled() -> bool:
    return SETTINGS.compatible_impl


def enable_deterministic_with_backward(tensor: Any) -> Any:
    """Return ``tensor``: the simulated operators are always deterministic."""
    return tensor


def disable_deterministic_with_backward(tensor: Any) -> Any:
    """Return ``tensor``; see :func:`enable_deterministic_with_backward`."""
    return tensor


def set_op_timeout_ms(timeout: int) -> None:
    """Do nothing: no operator is waited for."""


def cores() -> dict[str, int]:
    """Return the cores of the chip that the device is called after, else of a 910B."""
    model = chip() or GENERATION
    return {"cube_core_num": model.cube_cores, "vector_core_num": model.vector_cores}


def limited(before: dict[str, int], cube_num: int, vector_num: int) -> dict[str, int]:
    """Return ``before`` updated with the numbers that are not -1."""
    limits = {"cube_core_num": cube_num, "vector_core_num": vector_num}
    return before | {name: number for name, number in limits.items() if number != -1}


def set_device_limit(device: int, cube_num: int = -1, vector_num: int = -1) -> None:
    """Store the limit; nothing runs on cores here."""
    SETTINGS.device_limits[device] = limited(get_device_limit(device), cube_num, vector_num)


def get_device_limit(device: int) -> dict[str, int]:
    """Return the numbers of cores that operators of this device may use."""
    return SETTINGS.device_limits.get(device) or cores()


def set_stream_limit(stream: Stream, cube_num: int = -1, vector_num: int = -1) -> None:
    """Store the limit; nothing runs on cores here."""
    SETTINGS.stream_limits[stream.stream_id] = limited(get_stream_limit(stream), cube_num, vector_num)


def get_stream_limit(stream: Stream) -> dict[str, int]:
    """Return the numbers of cores that operators of this stream may use."""
    return SETTINGS.stream_limits.get(stream.stream_id) or cores()


def reset_stream_limit(stream: Stream) -> None:
    SETTINGS.stream_limits.pop(stream.stream_id, None)


def get_npu_overflow_flag() -> bool:
    """Raise: only chips before the 910B generation have the flag."""
    raise RuntimeError("Unsupported api when soc_version >= Ascend910B1, please use npu_check_overflow")


def clear_npu_overflow_flag() -> None:
    """Warn, as on a 910B, which has no such flag."""
    warnings.warn(
        "When soc_version >= Ascend910B1, clear_npu_overflow_flag is useless. Please remove it.", stacklevel=2
    )
