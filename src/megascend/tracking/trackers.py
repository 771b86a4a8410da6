"""All trackers of a run, on rank 0."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascend.io.atomic import replacing
from megascend.io.paths import make_directory
from megascend.tracking.background import BackgroundTracker
from megascend.tracking.base import Outcome, TrackedRun
from megascend.tracking.registry import opener

logger = logging.getLogger(__name__)

FOLDER, RUN_IDS = "trackers", "run_ids.json"
"""In the run directory: what trackers keep there, and what each of them calls the run."""
CLOSING_S = 60.0
CLOSING_AFTER_ERROR_S = 10.0


class Trackers:
    """Opened with the first record, so that a run that does not start leaves none. The same calls as of one tracker."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]],
        output: Path,
        config: Mapping[str, Any],
        resumed_after: int = 0,
        on_failure: Callable[[str, str], None] = lambda name, problem: None,
    ) -> None:
        """
        Args:
            options: of every tracker, by name; checked by :func:`megascend.tracking.registry.check_trackers`.
            output: the run directory.
            config: the run's settings, JSON.
            on_failure: told of each tracker's first failure; on any thread.
        """
        self._options, self._output, self._config = options, output, config
        self._folder = output / FOLDER
        self._resumed_after, self._on_failure = resumed_after, on_failure
        self._ids_lock = threading.Lock()
        self._trackers: list[BackgroundTracker] | None = None

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Numbers of a row of metrics.jsonl; those that are not known or not finite are left out."""
        figures = {
            f"train/{key}": float(value)
            for key, value in row.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for tracker in self._opened():
            tracker.log(step, figures)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts by their titles."""
        for tracker in self._opened():
            tracker.log_texts(step, texts)

    def close(self, outcome: Outcome) -> None:
        """Wait for all of them, not for ever."""
        for tracker in self._trackers or ():
            tracker.close(outcome, CLOSING_AFTER_ERROR_S if outcome == "failed" else CLOSING_S)
        self._trackers = []
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # if nobody has put anything there

    def _opened(self) -> list[BackgroundTracker]:
        if self._trackers is None and not self._options:
            self._trackers = []
        if self._trackers is None:
            known = read_run_ids(self._folder) if self._resumed_after else {}
            self._trackers = []
            try:
                make_directory(self._folder)
            except OSError as error:
                for name in self._options:
                    self._failed(name, f"{self._folder} cannot be made: {error.strerror or error}")
                return self._trackers
            for name, options in self._options.items():
                run = TrackedRun(
                    self._output.resolve().name,
                    self._folder,
                    self._config,
                    self._resumed_after,
                    known.get(name),
                    options,
                )
                self._trackers.append(BackgroundTracker(name, opener(name), run, self._keep_id, self._failed))
        return self._trackers

    def _keep_id(self, name: str, run_id: str | None) -> None:
        if run_id is None:
            return
        with self._ids_lock:
            ids = read_run_ids(self._folder) | {name: run_id}
            with replacing(self._folder / RUN_IDS) as fresh:
                fresh.write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")

    def _failed(self, name: str, problem: str) -> None:
        logger.warning("tracker %s: %s; training continues", name, problem)
        self._on_failure(name, problem)


def read_run_ids(folder: Path) -> dict[str, str]:
    """What each tracker called a run, by its folder; of a file that is missing or damaged, nothing."""
    try:
        found = json.loads((folder / RUN_IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {name: run_id for name, run_id in found.items() if isinstance(run_id, str)} if isinstance(found, dict) else {}
    )
