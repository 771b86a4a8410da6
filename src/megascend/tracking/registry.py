"""Trackers: what one is given and takes, and their registry by name, built in or registered by plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from megascend.errors import ConfigError, MissingDependencyError
from megascend.surroundings import is_installed

Outcome = Literal["finished", "stopped", "failed"]
"""How a run ended: at its last step, by a signal and to be resumed, or with an error."""


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker gets it when it is opened.

    Attributes:
        name: of the run, for people: its output directory's.
        folder: OUTPUT/trackers, which is there. What a tracker keeps on the disk goes there, in a folder of its name.
        config: the run's settings, JSON.
        resumed_after: the step that the run was resumed after; 0: it begins.
        run_id: what the tracker called the run before it was resumed (:attr:`Tracker.run_id`), or None.
        options: what the run file says under the tracker's name, for whatever creates the run in its package.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed_after: int = 0
    run_id: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Takes a run's figures. Used on rank 0, on a thread of its own, by one call at a time; what it raises ends no run.

    Attributes:
        run_id: by which the run can be continued in another process, or None.
    """

    @property
    def run_id(self) -> str | None: ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step, under the names of metrics.jsonl with ``train/`` in front. Steps come in order."""
        ...

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """What the model answered after a step, by prompt."""
        ...

    def close(self, outcome: Outcome) -> None:
        """There is nothing more to come."""
        ...


OpenTracker = Callable[[TrackedRun], Tracker]
"""Opens a tracker; called on its thread, at the run's first record."""


@dataclass(frozen=True)
class TrackerEntry:
    """A tracker of the registry.

    Attributes:
        open: a function or class; or ``module:name`` of one, imported on use.
        package: required module, or None.
        extra: extra of megascend that installs the package, or None.
    """

    open: OpenTracker | str
    package: str | None = None
    extra: str | None = None


def register_tracker(name: str, open_tracker: OpenTracker, *, package: str | None = None) -> None:
    """Make a tracker known by its name, to run files (``trackers: [NAME]``).

    Every rank registers it, most simply where the module that defines it is imported, which a run file names under ``plugins``.
    Registering it again changes nothing.

    Args:
        open_tracker: called with a :class:`TrackedRun` on rank 0; returns a :class:`Tracker`.
        package: the module that has to be there; its absence is then an error before training.

    Raises:
        ConfigError: another tracker has that name.
    """
    known = _entries.get(name)
    if known is not None and known.open is not open_tracker:
        raise ConfigError(f"register_tracker: another tracker is called {name!r}; names in use: {', '.join(_entries)}")
    _entries[name] = TrackerEntry(open_tracker, package)


def check_trackers(names: Iterable[str], *, plugins: bool = False) -> None:
    """Raise before training if a tracker is unknown (unless ``plugins`` may register it) or its package missing. Imports
    nothing.
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
            advice = f", did you mean {alike[0]}?" if alike else ";"
            raise ConfigError(
                f"trackers: there is no {name!r}{advice} there are {', '.join(_entries)}. Register yours on every rank "
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
    "tensorboard": TrackerEntry("megascend.tracking.built_in:TensorBoard", "tensorboard", "track"),
    "wandb": TrackerEntry("megascend.tracking.built_in:Wandb", "wandb", "wandb"),
    "swanlab": TrackerEntry("megascend.tracking.built_in:SwanLab", "swanlab", "swanlab"),
    "trackio": TrackerEntry("megascend.tracking.built_in:Trackio", "trackio", "trackio"),
    "mlflow": TrackerEntry("megascend.tracking.built_in:Mlflow", "mlflow", "mlflow"),
}
