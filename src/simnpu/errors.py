"""Errors of the simulated device about itself; what a real device would raise has the real device's classes."""

from __future__ import annotations


class SimnpuError(Exception):
    """Base of all errors of this package's own."""


class ConfigError(SimnpuError, ValueError):
    """A setting or an environment variable has a value that cannot be."""


class PlatformError(SimnpuError, RuntimeError):
    """The simulated device lacks something, or something was asked of it that no device does."""


class NotSimulatedError(PlatformError, AttributeError):
    """A part of torch_npu that the simulated device does not have. An AttributeError, so ``hasattr`` answers False."""


class ImportOrderError(SimnpuError, ImportError):
    """The simulated device was activated after something that must come later."""


class MissingDependencyError(SimnpuError, ImportError):
    """A package is missing that the simulated device cannot do without."""


class StreamRaceWarning(RuntimeWarning):
    """In strict mode: work that races with other work on a card, because neither waits for the other."""


def missing(name: str, module: str = "torch_npu") -> AttributeError:
    """Build the exception for ``torch_npu.<name>``; dunder names get a plain AttributeError, as Python's protocols expect."""
    if name.startswith("__"):
        return AttributeError(f"module '{module}' has no attribute '{name}'")
    kind = "operator" if name.lstrip("_").startswith("npu_") else "name"
    return NotSimulatedError(
        f"{module}.{name}: this {kind} is not simulated by simnpu. It may exist in Huawei's torch_npu; to run "
        "it here, add it under simnpu (an operator: simnpu/operators), or switch off the feature "
        "that calls it"
    )
