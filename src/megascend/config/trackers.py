"""The tracker interface, and the registry of trackers by name, built-in or registered by plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from megascend.errors import ConfigError, MissingDependencyError
from megascend.surroundings import is_installed

RunOutcome = Literal["finished", "stopped", "failed"]
"""End of a run: at its last step, by a signal (it can be resumed), or with an error."""


@dataclass(frozen=True)
class TrackedRun:
    """A run, as passed to the opener of a tracker.

    Attributes:
        name: display name: that of the output directory.
        folder: OUTPUT/trackers, which exists. A tracker stores its files in a subfolder with its name.
        config: the run's settings, JSON.
        resumed_after: step of the checkpoint that the run resumes from; 0: a new run.
        run_id: the tracker's id of the run before it was resumed (:attr:`Tracker.run_id`), or None.
        options: options under the tracker's name in the run file, for the call that creates the run.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed_after: int = 0
    run_id: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Interface of a tracker. Used on rank 0, by its own thread, one call at a time; its exceptions do not end the run.

    Attributes:
        run_id: id by which another process can continue the run, or None.
    """

    @property
    def run_id(self) -> str | None: ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log metrics of a step, with the names of metrics.jsonl prefixed by ``train/``. Steps are in order."""
        ...

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Log generated answers after a step, by prompt.

        A tracker may also have ``log_rollouts(step, rows)`` for what ``megascend rl`` shows of a step: mappings of figures, with
        ``prompt`` and ``response`` as their last two entries. One without it gets them here.
        """
        ...

    def close(self, outcome: RunOutcome) -> None:
        """Finish the run."""
        ...


def log_rollouts(tracker: Tracker, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Pass rollouts to a tracker, as texts if it takes no table."""
    log_table = getattr(tracker, "log_rollouts", None)
    if log_table is not None:
        log_table(step, rows)
    else:
        tracker.log_texts(step, {f"[{figures_line(row)}] {row['prompt']}": row["response"] for row in rows})


def figures_line(row: Mapping[str, Any]) -> str:
    """Format the figures of a rollout in a line, without its texts."""
    figures = (item for item in row.items() if item[0] not in ("prompt", "response") and item[1] not in (None, ""))
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures
    )


OpenTracker = Callable[[TrackedRun], Tracker]
"""Opens a tracker; called on its thread at the first record."""


@dataclass(frozen=True)
class TrackerEntry:
    """An entry of the registry.

    Attributes:
        open: a function or class, or its ``module:name``, imported on use.
        package: module that must be installed, or None.
        extra: extra of megascend that installs the package, or None.
    """

    open: OpenTracker | str
    package: str | None = None
    extra: str | None = None


def register_tracker(name: str, open_tracker: OpenTracker, *, package: str | None = None) -> None:
    """Register a tracker by name, for run files (``trackers: [NAME]``).

    Every rank must register it, for example on import of a module that the run file lists under ``plugins``. Repeating it
    is harmless.

    Args:
        open_tracker: called with a :class:`TrackedRun` on rank 0; returns a :class:`Tracker`.
        package: required module; if it is missing, the run fails before training.

    Raises:
        ConfigError: another tracker has that name.
    """
    registered = _entries.get(name)
    if registered is not None and registered.open is not open_tracker:
        raise ConfigError(f"register_tracker: another tracker is called {name!r}; names in use: {', '.join(_entries)}")
    _entries[name] = TrackerEntry(open_tracker, package)


def check_trackers(names: Iterable[str], *, plugins: bool = False) -> None:
    """Raise before training if a tracker is unknown (unless ``plugins`` may register it) or its package is missing.

    Imports nothing.
    """
    names = list(names)
    if not plugins:
        check_tracker_names(names)
    for name in names:
        if name not in _entries:
            continue
        entry = _entries[name]
        if entry.package is not None and not is_installed(entry.package):
            install = f"pip install 'megascend[{entry.extra}]'" if entry.extra is not None else "install it"
            raise MissingDependencyError(
                f"trackers: {name} needs {entry.package}, which is not installed: {install}, or leave {name} out"
            )


def check_tracker_names(names: Iterable[str]) -> None:
    """Raise ConfigError for trackers that are not registered. Imports nothing."""
    for name in names:
        if name not in _entries:
            alike = get_close_matches(name, _entries, 1)
            advice = f", did you mean {alike[0]}?" if alike else "."
            raise ConfigError(
                f"trackers: unknown tracker {name!r}{advice} Available: {', '.join(_entries)}. Register your own on every rank "
                "(megascend.register_tracker; a run file names the module under plugins)"
            )


def opener(name: str) -> OpenTracker:
    """Return the opener of a registered tracker. Imports its module, not its package."""
    entry = _entries[name].open
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    return getattr(import_module(module), attribute)


_entries: dict[str, TrackerEntry] = {
    "tensorboard": TrackerEntry("megascend.apps.tracking.built_in:TensorBoard", "tensorboard", "track"),
    "wandb": TrackerEntry("megascend.apps.tracking.built_in:Wandb", "wandb", "wandb"),
    "swanlab": TrackerEntry("megascend.apps.tracking.built_in:SwanLab", "swanlab", "swanlab"),
    "trackio": TrackerEntry("megascend.apps.tracking.built_in:Trackio", "trackio", "trackio"),
    "mlflow": TrackerEntry("megascend.apps.tracking.built_in:Mlflow", "mlflow", "mlflow"),
}
