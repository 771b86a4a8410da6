"""Switches of the Ascend runtime. They select kernels that do not exist here, so they are kept and shown, not obeyed."""

from __future__ import annotations

from typing import Any


class Settings:
    """What the program has set; a test or a `doctor` can read it."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.jit_compile = False
        self.deterministic_level = 0


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
    """Options of the Ascend compiler, e.g. ``{"ACL_PRECISION_MODE": "must_keep_origin_dtype"}``.

    Raises:
        TypeError: not a dict.
    """
    if not isinstance(option, dict):
        raise TypeError(f"npu option must be a dict, got {type(option).__name__}")
    SETTINGS.options.update(option)


def set_compile_mode(jit_compile: bool = False) -> None:
    """Whether kernels are compiled for each shape; there are no kernels to compile."""
    SETTINGS.jit_compile = bool(jit_compile)


def is_jit_compile_false() -> bool:
    return not SETTINGS.jit_compile


def set_deterministic_level(level: int) -> None:
    """The simulated operators are deterministic at every level."""
    SETTINGS.deterministic_level = int(level)
