"""A tracker on a thread of its own: training neither waits for it nor ends with it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from megascend.tracking.base import OpenTracker, Outcome, TrackedRun, Tracker

logger = logging.getLogger(__name__)

WAITING = 10_000
"""Records that may wait for a tracker; further ones are lost."""


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
        """
        Args:
            opened: told the tracker's name and its run's id, on the tracker's thread.
            failed: told the tracker's name and the first problem, on any thread.
        """
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
