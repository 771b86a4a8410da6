"""Choosing the platform. A new one is one file here and one line in ``PLATFORMS``."""

from __future__ import annotations

from importlib import import_module

from megascend.errors import PlatformError
from megascend.platforms.base import MemoryFigures, Platform
from megascend.platforms.npu import explain_torch_npu_failure

__all__ = ["PLATFORMS", "MemoryFigures", "Platform", "choose"]

# In the order in which "auto" tries them.
PLATFORMS = {
    "npu": "megascend.platforms.npu:NpuPlatform",
    "cuda": "megascend.platforms.cuda:CudaPlatform",
    "cpu": "megascend.platforms.cpu:CpuPlatform",
}


def choose(name: str = "auto") -> Platform:
    """The platform called ``name``, or the first one that works here for ``auto``."""
    _require_torch()
    if name == "auto":
        for candidate in map(load, PLATFORMS):
            if candidate.unavailable_because() is None:
                return candidate
    if name not in PLATFORMS:
        raise PlatformError(f"unknown platform {name!r}; known: auto, {', '.join(PLATFORMS)}")
    platform = load(name)
    reason = platform.unavailable_because()
    if reason is not None:
        raise PlatformError(f"platform {name!r} cannot be used here: {reason}")
    return platform


def _require_torch() -> None:
    """torch loads torch_npu by itself where that is installed, and cannot be imported if torch_npu cannot."""
    try:
        import_module("torch")
    except (ImportError, RuntimeError, OSError) as error:
        raise PlatformError(f"torch cannot be imported: {explain_torch_npu_failure(error)}") from error


def load(name: str) -> Platform:
    """The platform called ``name``, whether it can be used here or not. Imports no torch."""
    module, _, attribute = PLATFORMS[name].partition(":")
    return getattr(import_module(module), attribute)()
