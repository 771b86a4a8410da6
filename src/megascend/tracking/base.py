"""What a run knows of a tracker, and a tracker of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["finished", "stopped", "failed"]
"""How a run ended: at its last step, by a signal and to be resumed, or with an error."""

PROJECT = "megascend"
"""What the run belongs to where a tracker sorts runs by projects and the run file names none."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when it is opened.

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


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys, for trackers that have no nested ones. Pure."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
