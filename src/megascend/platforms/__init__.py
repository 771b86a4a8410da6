"""Choosing the platform. A new one is one file here and one line in ``PLATFORMS``."""

from __future__ import annotations

from importlib import import_module

from megascend.errors import PlatformError
from megascend.platforms.base import MemoryFigures, Platform

__all__ = ["PLATFORMS", "MemoryFigures", "Platform", "choose"]

# In the order in which "auto" tries them.
PLATFORMS = {
    "npu": "megascend.platforms.npu:NpuPlatform",
    "cuda": "megascend.platforms.cuda:CudaPlatform",
    "cpu": "megascend.platforms.cpu:CpuPlatform",
}


def choose(name: str = "auto") -> Platform:
    """The platform called ``name``, or the first one that works here for ``auto``.

    Raises:
        PlatformError: the name is unknown, or the platform cannot be used here (the message says why).
    """
    _require_torch()
    if name == "auto":
        for candidate in map(_load, PLATFORMS):
            if candidate.unavailable_because() is None:
                return candidate
    if name not in PLATFORMS:
        raise PlatformError(f"unknown platform {name!r}; known: auto, {', '.join(PLATFORMS)}")
    platform = _load(name)
    reason = platform.unavailable_because()
    if reason is not None:
        raise PlatformError(f"platform {name!r} cannot be used here: {reason}")
    return platform


def _require_torch() -> None:
    """torch loads torch_npu by itself where that is installed, and cannot be imported if torch_npu cannot."""
    try:
        import_module("torch")
    except (ImportError, RuntimeError, OSError) as error:
        from megascend.bootstrap.mindspeed.prerequisites import explain_torch_npu_failure

        raise PlatformError(f"torch cannot be imported: {explain_torch_npu_failure(error)}") from error


def _load(name: str) -> Platform:
    module, _, attribute = PLATFORMS[name].partition(":")
    return getattr(import_module(module), attribute)()
