"""All trackers of a run, on rank 0, each on a thread of its own: training neither waits for one nor ends with it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascend.io.atomic import replacing
from megascend.io.paths import make_directory
from megascend.tracking.registry import OpenTracker, Outcome, TrackedRun, Tracker, opener

logger = logging.getLogger(__name__)

FOLDER, RUN_IDS = "trackers", "run_ids.json"
"""In the run directory: what trackers keep there, and what each of them calls the run."""
WAITING = 10_000
"""Records that may wait for a tracker; further ones are lost."""
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
        """``options``: of every tracker, by name; ``config``: the run's settings, JSON; ``on_failure``: called on any thread."""
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


class BackgroundTracker:
    """Hands records to a tracker in their order. The first failure is said once; what fails later is counted.

    A tracker that cannot be opened is not tried again. One whose call fails is called with the next record: a network may come
    back.
    """

    def __init__(
        self,
        name: str,
        open_tracker: OpenTracker,
        run: TrackedRun,
        opened: Callable[[str, str | None], None],
        failed: Callable[[str, str], None],
        waiting: int = WAITING,
    ) -> None:
        """``opened`` gets (name, run id) on the tracker's thread; ``failed`` (name, first problem) on any."""
        self.name = name
        self._open, self._run, self._opened, self._failed = open_tracker, run, opened, failed
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(waiting)
        self._lost = 0
        self._told = False
        self._outcome: Outcome = "failed"
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand over figures of a step; returns at once."""
        self._put(lambda tracker: tracker.log(step, figures))

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Hand over texts; returns at once."""
        self._put(lambda tracker: tracker.log_texts(step, texts))

    def close(self, outcome: Outcome, timeout_s: float) -> None:
        """Wait until the tracker has everything and is closed; after ``timeout_s`` it is left to itself, and a line says so."""
        self._outcome = outcome
        deadline = time.monotonic() + timeout_s
        try:
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            left = self._waiting.qsize()
            logger.warning(
                "tracker %s: not through after %.0f s, %d records still wait; they are lost", self.name, timeout_s, left
            )
        elif self._lost:
            logger.warning("tracker %s: %d records were lost", self.name, self._lost)

    def _put(self, record: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._problem(f"{self._waiting.maxsize} records wait for it")

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._open(self._run)
            self._opened(self.name, tracker.run_id)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever its package raises, training goes on
            self._problem(f"it cannot be opened: {type(error).__name__}: {error}", lost=0)
        while (record := self._waiting.get()) is not None:
            self._call(tracker, record)
        if tracker is not None:
            self._call(tracker, lambda tracker: tracker.close(self._outcome), lost=0)

    def _call(self, tracker: Tracker | None, record: Callable[[Tracker], None], lost: int = 1) -> None:
        if tracker is None:
            self._lost += lost
            return
        try:
            record(tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001  likewise
            self._problem(f"{type(error).__name__}: {error}", lost)

    def _problem(self, text: str, lost: int = 1) -> None:
        self._lost += lost
        if not self._told:
            self._told = True
            self._failed(self.name, text)
