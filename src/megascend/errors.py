"""Error classes of megascend.

One hierarchy, so that a trainer can write ``except megascend.MegascendError``. Each class also inherits the matching built-in
(``ValueError``, ``ImportError``, ...), takes one message, and can be pickled. A message gives the actual and the expected value,
the rank, and what to set or install.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"
_WORD = (
    r"passw(?:or)?d|passphrase|pwd|secret|credentials?|authorization|cookie|(?:api|access|secret|private|wandb)[_-]?key"
)
_TOKEN = r"(?:(?:access|auth|api|hf|bearer|session|security|refresh|id|private)[_-]?)?token"
_SECRET_NAME = re.compile(rf"(?:.*[_-]|.*[a-z0-9](?=[A-Z]))?(?i:{_WORD})|(?i:{_TOKEN}|pass|bearer|(?:basic_)?auth)")
_IN_QUERY = rf"(?<=[?&;#])((?:[\w-]*[_-])?(?:{_WORD}|{_TOKEN}|pass|auth|key|sig|signature)=)[^&;#\s'\"]+"
_IN_URL = re.compile(rf"(?<=://)[^/?#\s'\"]+(?=@)|{_IN_QUERY}", re.IGNORECASE)


def redacted(value: Any) -> Any:
    """Return a text, or JSON, without the passwords in URLs, and without the values of entries called ``password`` and alike."""
    if isinstance(value, str):
        return _IN_URL.sub(lambda match: (match[1] or "") + HIDDEN, value) if "://" in value else value
    if isinstance(value, dict):
        secret = {name for name in value if isinstance(name, str) and _SECRET_NAME.fullmatch(name)}
        return {
            name: HIDDEN if name in secret and entry and entry is not True else redacted(entry)
            for name, entry in value.items()
        }
    return type(value)(map(redacted, value)) if type(value) in (list, tuple) else value


def hidden_entries(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys (``trackers.mlflow.tracking_uri``) at which :func:`redacted` has left something out."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from hidden_entries(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from hidden_entries(entry, key)
    elif (value == HIDDEN and _SECRET_NAME.fullmatch(key.rpartition(".")[2])) or (
        isinstance(value, str) and any(match[0].endswith(HIDDEN) for match in _IN_URL.finditer(value))
    ):
        yield key


class MegascendError(Exception):
    """Base of all megascend errors. Its message is :func:`redacted`.

    Attributes:
        on_all_ranks: every rank raises it, so that all of them may enter another collective, such as a save.
    """

    on_all_ranks: bool = False

    def __init__(self, *args: object) -> None:
        super().__init__(*redacted(args))


class ConfigError(MegascendError, ValueError):
    """A setting, or a combination of settings, is invalid or not supported."""


class TopologyError(ConfigError):
    """The parallel layout does not fit the world size or the model."""


class SelfCheckError(ConfigError):
    """An engine's results differ from transformers' for a model's configuration."""


class DataError(MegascendError, ValueError):
    """A sample or a batch cannot be trained on."""


class LossFunctionError(DataError):
    """A loss function raised on some rank, or returned an invalid result; the message contains its traceback."""


class EvaluationError(MegascendError, RuntimeError):
    """A task of lm-eval-harness does not exist, cannot be loaded from this machine, or failed."""


class ImportOrderError(MegascendError, ImportError):
    """A package that must be patched was imported before ``megascend.bootstrap()``."""


class VersionError(MegascendError, ImportError):
    """The installed packages are not a combination megascend supports."""


class MissingDependencyError(MegascendError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""


class PlatformError(MegascendError, RuntimeError):
    """The requested platform, or a feature of it, is not available here."""


class OutOfDeviceMemoryError(MegascendError, MemoryError):
    """A request does not fit into device memory; it had no effect, and others are not affected."""


class CheckpointError(MegascendError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class HubError(MegascendError, RuntimeError):
    """The Hugging Face Hub refuses a token, a repository or an upload, or cannot be reached."""


class ProcessGroupError(MegascendError, RuntimeError):
    """A process group is missing, or of the wrong kind for the operation."""


class OutOfStepError(ProcessGroupError):
    """Ranks joined one collective from different calls, or with different arguments; the message names each rank's call."""


class CollectiveTimeoutError(MegascendError, TimeoutError):
    """Some ranks did not join a collective in time; the message names them."""


class PeerLostError(CollectiveTimeoutError, ConnectionError):
    """A rank has exited or failed and will not join the collective; the message names it and its position."""


class WorkerError(MegascendError, RuntimeError):
    """A process of ``--nproc`` failed with something other than a megascend error: an exception, a signal, an exit code."""


class DistributedTestError(MegascendError, AssertionError):
    """A rank of ``megascend.testing.run_distributed`` failed; the message contains its traceback."""


class NonFiniteError(MegascendError, ArithmeticError):
    """Too many steps in a row had a non-finite loss or gradient."""


class WeightSyncError(MegascendError, RuntimeError):
    """Weights did not reach an inference engine, or are not active there; the message names it and its active weights."""


class EngineFaultError(WeightSyncError):
    """An inference engine took no weights: it was too slow, was lost, or failed at them; others may take the same weights."""


class QueueFullError(MegascendError, RuntimeError):
    """The request queue of an adapter is full."""


class EngineError(MegascendError, RuntimeError):
    """An inference engine or the sampler rejected a request or failed at it; the message names the engine and the reason."""


class EngineLostError(EngineError, ConnectionError):
    """An inference engine is not reachable, or was lost before it answered."""


class EngineTimeoutError(EngineError, TimeoutError):
    """An inference engine did not answer within the deadline."""


class ControllerError(MegascendError, RuntimeError):
    """A rollout controller rejected a request or failed at it."""


class MessageError(ControllerError, ValueError):
    """A message to a rollout controller is malformed, of another version, or reuses an id with other content."""


class EngineOwnedError(ControllerError):
    """An inference engine is owned by another client, which the message names."""


class LeaseLapsedError(ControllerError, TimeoutError):
    """A claim on inference engines was not renewed in time, or was released; its engines have been resumed."""


class ControllerBusyError(ControllerError):
    """A limit of the rollout controller is reached; the request had no effect and may be retried."""


class ControllerLostError(ControllerError, ConnectionError):
    """A rollout controller is not reachable, is closing, or was lost before it answered."""


class ControllerRestartedError(ControllerLostError):
    """The rollout controller has been restarted, and has lost all claims and tasks.

    The new one has not executed the request; the old one may have.
    """


class RolloutTaskError(ControllerError):
    """A rollout failed at its worker, is unknown or expired, or was not completed in time; the message names it."""
