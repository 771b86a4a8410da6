"""Choose the platform. A new platform needs one file here and one line in ``PLATFORMS``."""

from __future__ import annotations

from importlib import import_module

from megascend.config import registry
from megascend.errors import PlatformError
from megascend.runtime.platforms.base import Platform
from megascend.runtime.platforms.npu import explain_torch_npu_failure

# "auto" tries them in this order: accelerators first, since the CPU is always available.
PLATFORMS = {
    "npu": "megascend.runtime.platforms.npu:NpuPlatform",
    "cuda": "megascend.runtime.platforms.cuda:CudaPlatform",
    "cpu": "megascend.runtime.platforms.cpu:CpuPlatform",
}


def choose(name: str = "auto") -> Platform:
    """Return the platform ``name``, or for ``auto`` the first one that is available here."""
    # torch loads an installed torch_npu at its own import, and cannot be imported if torch_npu cannot.
    try:
        import_module("torch")
    except (ImportError, RuntimeError, OSError) as error:
        raise PlatformError(f"torch cannot be imported: {explain_torch_npu_failure(error)}") from error
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


def load(name: str) -> Platform:
    """Return the platform ``name`` without checking that it is available here. Does not import torch."""
    return registry.load(PLATFORMS[name])()
