"""The interface of a tracker, and how run files name one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megascend.config.registry import TRACKERS, TrackerEntry
from megascend.errors import MissingDependencyError
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
    TRACKERS.add(name, TrackerEntry(open_tracker, package))


def check_trackers(names: Iterable[str], *, plugins: bool = False) -> None:
    """Raise before training if a tracker is unknown (unless ``plugins`` may register it) or its package is missing.

    Imports nothing.
    """
    for name in names:
        if plugins and name not in TRACKERS:
            continue
        entry = TRACKERS.require(name, "trackers")
        if entry.package is not None and not is_installed(entry.package):
            install = f"pip install 'megascend[{entry.extra}]'" if entry.extra is not None else "install it"
            raise MissingDependencyError(
                f"trackers: {name} needs {entry.package}, which is not installed: {install}, or leave {name} out"
            )
