"""Every error that megascend raises on purpose.

One hierarchy, so that a trainer can write ``except megascend.MegascendError``. Each class also inherits the built-in
that a reader would expect (``ValueError``, ``ImportError``, ...), takes one message, and survives pickling between
processes. A message says what was found, what was expected, on which rank, and what to set or install.
"""

from __future__ import annotations


class MegascendError(Exception):
    """Base of all megascend errors."""


class ConfigError(MegascendError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class TopologyError(ConfigError):
    """The parallel layout does not fit the world size or the model."""


class SelfCheckError(ConfigError):
    """Megatron computes something else than transformers for a model's configuration."""


class DataError(MegascendError, ValueError):
    """A sample or a batch cannot be trained on."""


class LossFunctionError(DataError):
    """A loss function raised on some rank, or returned what cannot be trained on; the message holds its traceback."""


class ImportOrderError(MegascendError, ImportError):
    """A package that must be patched was imported before ``megascend.bootstrap()``."""


class VersionError(MegascendError, ImportError):
    """The installed packages are not a combination megascend supports."""


class MissingDependencyError(MegascendError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class PlatformError(MegascendError, RuntimeError):
    """The asked-for platform, or a feature of it, is not available here."""


class OutOfDeviceMemoryError(MegascendError, MemoryError):
    """The device's memory has no room for a request; nothing of it was done, and others go on."""


class CheckpointError(MegascendError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class ProcessGroupError(MegascendError, RuntimeError):
    """A process group is missing, or not of the kind that the operation needs."""


class OutOfStepError(ProcessGroupError):
    """Ranks met in one collective from different calls, or with different arguments; the message says where each one is."""


class CollectiveTimeoutError(MegascendError, TimeoutError):
    """Some ranks did not arrive at a collective in time; the message names them."""


class PeerLostError(CollectiveTimeoutError, ConnectionError):
    """A rank is gone, or has failed, and will not come any more; the message names it and where it was."""


class DistributedTestError(MegascendError, AssertionError):
    """A rank of ``megascend.testing.run_distributed`` failed; the message carries its traceback."""


class NonFiniteError(MegascendError, ArithmeticError):
    """Too many steps in a row had a non-finite loss or gradient."""


class WeightSyncError(MegascendError, RuntimeError):
    """Weights did not reach an engine, or are not in force there; the message names it and says which weights are in force."""


class QueueFullError(MegascendError, RuntimeError):
    """An adapter has as many requests waiting as its queue takes."""


class EngineError(MegascendError, RuntimeError):
    """An inference engine or the sampler refused, or failed at, what it was asked for; the message says which, and why."""


class EngineLostError(EngineError, ConnectionError):
    """An inference engine cannot be reached, or was gone before it had answered."""


class EngineTimeoutError(EngineError, TimeoutError):
    """An inference engine did not answer within the deadline."""


class ControllerError(MegascendError, RuntimeError):
    """A rollout controller refused, or failed at, what it was asked for."""


class MessageError(ControllerError, ValueError):
    """What a rollout controller was sent is malformed, of another version, or was said before with other words."""


class EngineOwnedError(ControllerError):
    """An engine belongs to another owner, whom the message names."""


class LeaseLapsedError(ControllerError, TimeoutError):
    """A claim on engines was not renewed in time, or was released; its engines have been continued."""


class ControllerBusyError(ControllerError):
    """A bound of the rollout controller is reached; what was asked for has not been done and may be asked for again."""


class ControllerLostError(ControllerError, ConnectionError):
    """A rollout controller cannot be reached, is closing, or was gone before it had answered."""


class ControllerRestartedError(ControllerLostError):
    """The rollout controller is another one than before, and knows no claims and tasks of before.

    It has not done what was asked; the former one may have.
    """


class RolloutTaskError(ControllerError):
    """A rollout has failed where it was made, is not expected (any more), or was not completed in time; the message names it."""
