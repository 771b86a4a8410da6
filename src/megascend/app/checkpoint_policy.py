"""When a run takes checkpoints, and what happens when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.app.run_directory import CHECKPOINTS
from megascend.checkpoint.retention import Retention
from megascend.config import TrainerConfig
from megascend.errors import CheckpointError

if TYPE_CHECKING:
    from megascend.app.event_log import EventLog
    from megascend.backend import Backend
    from megascend.checkpoint.saver import PendingSave

logger = logging.getLogger(__name__)


class CheckpointPolicy:
    """Takes a run's checkpoints by its settings. All ranks call the same methods in the same order.

    Attributes:
        stall_s: seconds that training has stood still for checkpoints so far, on this rank.
        problem: why the last checkpoint could not be written, as far as that is known.
    """

    def __init__(
        self,
        backend: Backend,
        config: TrainerConfig,
        event_log: EventLog,
        progress: Callable[[], dict[str, Any]],
        before: Callable[[], object] = lambda: None,
        ready: Callable[[], bool] = lambda: True,
        best: Callable[[], int | None] = lambda: None,
    ) -> None:
        """
        Args:
            progress: returns the loop's state to resume from, as JSON; called at every save.
            before: called on every rank before a save.
            ready: returns True, on every rank, once the run has something worth saving. Until then no checkpoint is due, because
                files of an earlier run may still be in the output directory.
            best: returns the step whose checkpoint is the best so far, which is saved at once and kept; None: there is none.
        """
        self._backend, self._config, self._settings = backend, config, config.checkpoint
        self._event_log, self._progress, self._before, self._ready = event_log, progress, before, ready
        self._best = best
        self._series = Retention(
            config.output / CHECKPOINTS, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every
        )
        self._pending: PendingSave | None = None
        self._last = backend.step_count  # of 0 steps there is nothing to save
        self._saved = False  # a checkpoint of step self._last is in this series
        self.stall_s = 0.0
        self.problem: str | None = None
        if self._settings.every and self._settings.asynchronous:
            backend.prepare_saves()

    def after_step(self, step: int, stop: bool) -> bool:
        """Save if it is time to; return True if any rank was told to stop. Once a step.

        Args:
            stop: this rank was told to stop after this step.
        """
        running = self._pending is not None and not self._pending.done
        # One exchange for both: ranks must agree on a stop, and on whether the last save has ended, before any of them acts.
        stopping, running = self._backend.any_rank(stop, running)
        if not running:
            self._settle()
        # Stopped while it waits for its next step, a run may have saved this one; of step 0 only a stop leaves a checkpoint.
        due = self._settings.every and step % self._settings.every == 0
        if (stopping or due or self._best() == step) and self._ready() and (self._last != step or step == 0):
            self._save(step)
        return stopping

    def finish(self, step: int) -> None:
        """Wait for the last checkpoint; without one of the last step, take it if checkpoints are taken at all."""
        # A run that takes no checkpoints leaves none at its end either.
        if self._settings.every and self._ready() and self._last != step:
            self._save(step)
        self._settle()

    def save_last(self, step: int) -> None:
        """Save what a run has learned that is about to end with an error, which takes precedence over one of the save."""
        try:
            self.after_step(step, stop=True)
            self.finish(step)
        except Exception as error:  # noqa: BLE001  the run ends with the error that came first
            logger.warning("step %d could not be saved: %s", step, error)

    def keep(self, step: int) -> str:
        """Save the last step of a run whose results could not be written; return where it is, in a sentence."""
        path = self._series.path(step)
        if self._last != step or not self._saved:
            try:
                self._save(step, hf=False)
                self._settle()
            except CheckpointError as error:  # the other problem is the one to raise
                self.problem = str(error)
        if self.problem is not None:
            return f"nor could a checkpoint of step {step} be written: {self.problem}"
        return f"{path} keeps what was trained: once this is mended, --resume auto exports it"

    def _save(self, step: int, *, hf: bool | None = None) -> None:
        # The output directory may still hold an earlier run, which is removed before the first thing is kept.
        self._before()
        start = time.perf_counter()
        self._settle()
        # Before the save: an error in it must not be taken for one of an earlier step.
        self._last, self._saved, self.problem = step, False, None
        try:
            self._pending = self._begin(step, self._settings.hf if hf is None else hf)
            if not self._settings.asynchronous:
                self._pending.wait()
                self._saved = True
            stall_s = time.perf_counter() - start
            self.stall_s += stall_s
            self._event_log.event("save", step=step, stall_s=round(stall_s, 3))
        except CheckpointError as error:
            self._failed(str(error))

    def best_path(self) -> Path | None:
        """Return the best checkpoint, or None if there is none."""
        best = self._best()
        path = None if best is None else self._series.path(best)
        return path if self._backend.from_rank_0(lambda: path is not None and path.is_dir()) else None

    def _begin(self, step: int, hf: bool) -> PendingSave:
        # As of this save: the one of a later best step may not be complete when this one is.
        best = self._best()
        try:
            return self._backend.save(
                self._series.path(step),
                progress=self._progress(),
                config=self._config.model_dump(mode="json"),
                hf=hf,
                after=lambda path: self._committed(path, best),
            )
        except CheckpointError as error:  # on every rank
            if not hf:
                raise
            # A model that transformers could not load is no reason to lose what a resumed run needs.
            self._event_log.event("hf_failed", step=step, problem=str(error))
            if self._backend.rank == 0:
                logger.warning("the checkpoint of step %d is without its hf directory (checkpoint.hf): %s", step, error)
            return self._begin(step, hf=False)

    def _committed(self, path: Path, best: int | None) -> None:
        self._series.committed(path, best)
        self._event_log.event("saved", checkpoint=path.name)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if any, and record its outcome, the same on every rank."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        problem = pending.outcome()
        # Each rank has a clock of its own: one may have timed out where another has just seen the end.
        (failed,) = self._backend.any_rank(problem is not None)
        self._saved = not failed
        if failed:
            self._failed(problem or f"save: {pending.path} was not complete in time on another rank")

    def _failed(self, problem: str) -> None:
        self._pending, self._saved, self.problem = None, False, problem
        self._last = -1  # there is no checkpoint of that step: finish() tries once more
        self._event_log.event("save_failed", problem=problem)
        # Raised on every rank: all of them come here with the same verdict.
        if self._settings.on_failure == "stop":
            raise CheckpointError(problem)
        if self._backend.rank == 0:
            logger.warning("%s; training continues (checkpoint.on_failure: continue)", problem)
