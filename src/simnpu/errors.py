"""What the simulated device raises about itself; what a real device would raise has the real device's classes."""


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
