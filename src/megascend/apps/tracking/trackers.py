"""All trackers of a run, on rank 0, each on its own thread, so that a slow or failing tracker cannot affect training."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megascend.apps.tracking.tracker import OpenTracker, RunOutcome, TrackedRun, Tracker, log_rollouts
from megascend.config.registry import TRACKERS, load
from megascend.errors import redacted
from megascend.runtime.io.atomic import replacing
from megascend.runtime.io.paths import make_directory
from weightwire.background import BackgroundThread

logger = logging.getLogger(__name__)

FOLDER, RUN_IDS = "trackers", "run_ids.json"
"""Folder of the trackers in the run directory, and the file in it with each tracker's id of the run."""
WAITING = 10_000
"""Queue limit per tracker; further records are dropped."""
CLOSING_S = 60.0
CLOSING_AFTER_ERROR_S = 10.0


class Trackers:
    """A run's trackers, opened at the first record, so that a run that fails to start creates none."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]],
        output: Path,
        config: Mapping[str, Any],
        resumed_after: int = 0,
        on_failure: Callable[[str, str], None] = lambda name, problem: None,
    ) -> None:
        """Take each tracker's ``options`` by name, the run's settings as JSON, and a callback that any thread may call."""
        self._options, self._output, self._config = options, output, config
        self._folder = output / FOLDER
        self._resumed_after, self._on_failure = resumed_after, on_failure
        # Trackers open on threads of their own, and all write to one file of ids.
        self._ids_lock = threading.Lock()
        self._trackers: list[BackgroundTracker] | None = None

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Log the finite numbers of a row of metrics.jsonl; those of a mapping as KEY/NAME."""
        entries: dict[str, Any] = {}
        for key, value in row.items():
            entries |= (
                {f"{key}/{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
            )
        figures = {
            f"train/{key}": float(value)
            for key, value in entries.items()
            # Trackers draw NaN as a gap or fail on it; metrics.jsonl has it as null.
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for tracker in self._opened():
            tracker.log(step, figures)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for tracker in self._opened():
            tracker.log_texts(step, texts)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rollouts of a step, in the order of the rows."""
        for tracker in self._opened():
            tracker.log_rollouts(step, rows)

    def close(self, outcome: RunOutcome) -> None:
        """Close all trackers, each with a deadline."""
        for tracker in self._trackers or ():
            tracker.close(outcome, CLOSING_AFTER_ERROR_S if outcome == "failed" else CLOSING_S)
        self._trackers = []
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # only succeeds if empty

    def _opened(self) -> list[BackgroundTracker]:
        if self._trackers is None and not self._options:
            self._trackers = []
        if self._trackers is None:
            # Only a resumed run continues the old one; with --overwrite the file may be of an earlier run.
            run_ids = read_run_ids(self._folder) if self._resumed_after else {}
            self._trackers = []
            try:
                make_directory(self._folder)
            except OSError as error:
                for name in self._options:
                    self._failed(name, f"{self._folder} cannot be created: {error.strerror or error}")
                return self._trackers
            for name, options in self._options.items():
                run = TrackedRun(
                    self._output.resolve().name,
                    self._folder,
                    self._config,
                    self._resumed_after,
                    run_ids.get(name),
                    options,
                )
                self._trackers.append(
                    BackgroundTracker(name, load(TRACKERS[name].open), run, self._keep_id, self._failed)
                )
        return self._trackers

    def _keep_id(self, name: str, run_id: str | None) -> None:
        if run_id is None:
            return
        with self._ids_lock:
            ids = read_run_ids(self._folder) | {name: run_id}
            with replacing(self._folder / RUN_IDS) as fresh:
                fresh.write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")

    def _failed(self, name: str, problem: str) -> None:
        problem = redacted(problem)
        logger.warning("tracker %s: %s; training continues", name, problem)
        self._on_failure(name, problem)


def read_run_ids(folder: Path) -> dict[str, str]:
    """Read each tracker's id of a run; empty if the file is missing or damaged."""
    try:
        content = json.loads((folder / RUN_IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {name: run_id for name, run_id in content.items() if isinstance(run_id, str)}
        if isinstance(content, dict)
        else {}
    )


class BackgroundTracker:
    """Passes records to a tracker in order, on a thread. The first failure is reported, later ones are counted.

    A tracker that cannot be opened is not retried. After a failed call the next record is tried: the network may have recovered.
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
        """Start the thread. ``opened`` is called with (name, run id) on that thread, ``failed`` with (name, problem) on any."""
        self.name = name
        self._open, self._run, self._opened, self._failed = open_tracker, run, opened, failed
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(waiting)
        self._lost_count = 0
        self._failure_reported = False
        self._outcome: RunOutcome = "failed"
        # A daemon: a tracker that hangs in the network must not keep the process alive.
        self._thread = BackgroundThread(self._work, name=f"tracker-{name}")
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue metrics of a step; returns at once."""
        self._submit(lambda tracker: tracker.log(step, dict(figures)))

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Queue texts; returns at once."""
        self._submit(lambda tracker: tracker.log_texts(step, dict(texts)))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue rollouts; returns at once."""
        self._submit(lambda tracker: log_rollouts(tracker, step, copy.deepcopy(rows)))

    def close(self, outcome: RunOutcome, timeout_s: float) -> None:
        """Wait until the tracker has all records and is closed; after ``timeout_s`` log a warning and abandon it."""
        self._outcome = outcome
        deadline = time.monotonic() + timeout_s
        try:
            # The end of the queue: records before it are still logged.
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            left = self._waiting.qsize()
            logger.warning(
                "tracker %s: not finished after %.0f s, %d queued records are lost", self.name, timeout_s, left
            )
        elif self._lost_count:
            logger.warning("tracker %s: %d records were lost", self.name, self._lost_count)

    def _submit(self, record: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._problem(f"its queue of {self._waiting.maxsize} records is full")

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._open(self._run)
            self._opened(self.name, tracker.run_id)
        # SystemExit too, when a package cannot log in, and the panics of packages in Rust.
        except BaseException as error:  # noqa: BLE001  training continues after any error of its package
            self._problem(f"it cannot be opened: {type(error).__name__}: {error}", lost_count=0)
        while (record := self._waiting.get()) is not None:
            self._call(tracker, record)
        if tracker is not None:
            self._call(tracker, lambda tracker: tracker.close(self._outcome), lost_count=0)

    def _call(self, tracker: Tracker | None, record: Callable[[Tracker], None], lost_count: int = 1) -> None:
        if tracker is None:
            self._lost_count += lost_count
            return
        try:
            record(tracker)
        except BaseException as error:  # noqa: BLE001  as above
            self._problem(f"{type(error).__name__}: {error}", lost_count)

    def _problem(self, text: str, lost_count: int = 1) -> None:
        self._lost_count += lost_count
        if not self._failure_reported:
            self._failure_reported = True
            self._failed(self.name, text)
