"""Policy of a run's checkpoints: when they are saved, and how failures are handled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.apps.train.run_directory import CHECKPOINTS
from megascend.apps.train.run_inputs import INPUTS, Inputs
from megascend.errors import CheckpointError, redacted
from megascend.training.checkpoint.retention import Retention

if TYPE_CHECKING:
    from megascend.apps.train.learner import Learner
    from megascend.apps.train.object_storage import Uploads
    from megascend.apps.train.run_directory import OutputDirectory
    from megascend.training.checkpoint.saver import PendingSave

logger = logging.getLogger(__name__)


class CheckpointPolicy:
    """Saves a run's checkpoints according to its settings. All ranks call the same methods in the same order.

    Attributes:
        problem: reason why the last checkpoint could not be written, as far as known; else None.
    """

    def __init__(
        self,
        directory: OutputDirectory,
        learner: Learner,
        inputs: Inputs,
        on_save: Callable[[Path], object] = lambda path: None,
        uploads: Uploads | None = None,
    ) -> None:
        """
        Args:
            directory: taken over by the first save; none is made while it holds an earlier run.
            learner: has the state to resume from, and the best step, whose checkpoint is saved at once and kept.
            inputs: saved with each checkpoint.
            on_save: called on every rank with the directory of a checkpoint that is complete.
            uploads: gets every complete checkpoint, on rank 0.
        """
        self._directory, self._learner, self._inputs = directory, learner, inputs
        self._backend, self._event_log, config = directory.backend, directory.event_log, directory.config
        self._settings, self._on_save, self._uploads = config.checkpoint, on_save, uploads
        self._series = Retention(
            config.output / CHECKPOINTS, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every
        )
        self._pending: PendingSave | None = None
        # The last step that was saved; -1 if it was not, as in a run that begins or resumes from another directory.
        step = self._backend.step_count
        self._last_step = step if self._backend.from_rank_0(lambda: self._series.path(step).is_dir()) else -1
        self._saved = False  # a checkpoint of that step is complete in this run's directory
        if uploads is not None and self._last_step == step:
            uploads.add_checkpoint(self._series.path(step))  # an attempt before may have ended before its copy
        self.problem: str | None = None
        if self._settings.every and self._settings.asynchronous:
            self._backend.prepare_saves()

    def after_step(self, step: int, stop: bool, save: bool = False) -> bool:
        """Save if a checkpoint is due; return True if any rank is to stop. Once a step.

        Args:
            stop: this rank received a stop signal, or a callback of its asks to stop.
            save: a callback of this rank asks for a checkpoint.
        """
        running = self._pending is not None and not self._pending.done
        # One exchange for all: ranks must agree on a stop, and on whether the last save has ended, before any of them acts.
        stopping, running, requested = self._backend.any_rank(stop, running, save)
        if not running:
            self._finish_pending()
        # A run that is stopped while it waits for a batch may have saved this step already.
        due = requested or (self._settings.every and step % self._settings.every == 0)
        if stopping or due or self._learner.best_step == step:
            self._save_once(step)
        return stopping

    def finish(self, step: int) -> None:
        """Wait for the last checkpoint; save the last step first, unless it was saved or the run saves no checkpoints."""
        if self._settings.every:
            self._save_once(step)
        self._finish_pending()

    def save_last(self, step: int) -> None:
        """Save the last step of a run that is ending with an error; errors of the save are only logged."""
        try:
            self.after_step(step, stop=True)
            self.finish(step)
        except Exception as error:  # noqa: BLE001  the original exception takes precedence
            logger.warning("step %d could not be saved: %s", step, error)

    def keep(self, step: int) -> str:
        """Save the last step of a run whose results could not be written; return a sentence that names the checkpoint."""
        path = self._series.path(step)
        if self._last_step != step or not self._saved:
            try:
                self._save(step, hf=False)
                self._finish_pending()
            except CheckpointError as error:  # the caller raises the original error
                self.problem = str(error)
        if self.problem is not None:
            return f"nor could a checkpoint of step {step} be written: {self.problem}"
        return f"{path} holds the trained state: after fixing this, --resume auto exports it"

    def _save_once(self, step: int) -> None:
        """Save a step, unless it was saved, or the directory still holds an earlier run."""
        if self._last_step != step and not self._directory.holds_earlier_run:
            self._save(step)

    def _save(self, step: int, *, hf: bool | None = None) -> None:
        self._directory.take_over()
        start = time.perf_counter()
        self._finish_pending()
        # Before the save, so that an error in it is not attributed to an earlier step.
        self._last_step, self._saved, self.problem = step, False, None
        try:
            self._pending = self._begin(step, self._settings.hf if hf is None else hf)
            if not self._settings.asynchronous:
                self._pending.wait()
                self._saved = True
            self._event_log.event("save", step=step, stall_s=round(time.perf_counter() - start, 3))
        except CheckpointError as error:
            self._failed(str(error))

    def best_path(self) -> Path | None:
        best = self._learner.best_step
        path = None if best is None else self._series.path(best)
        return path if self._backend.from_rank_0(lambda: path is not None and path.is_dir()) else None

    def _begin(self, step: int, hf: bool) -> PendingSave:
        # Read now: by the time this save completes, a later step may be the best, and its checkpoint not complete yet.
        best = self._learner.best_step
        try:
            return self._backend.save(
                self._series.path(step),
                progress=self._learner.state() | {INPUTS: self._inputs},
                config=redacted(self._directory.config.model_dump(mode="json")),
                hf=hf,
                after=lambda path: self._committed(path, best),
            )
        except CheckpointError as error:  # on every rank
            if not hf:
                raise
            # A failed export must not cost the state to resume from.
            self._event_log.event("hf_failed", step=step, problem=str(error))
            if self._backend.rank == 0:
                logger.warning("the checkpoint of step %d is without its hf directory (checkpoint.hf): %s", step, error)
            return self._begin(step, hf=False)

    def _committed(self, path: Path, best: int | None) -> None:
        keep = set() if best is None else {best}
        if self._uploads is not None:
            self._uploads.add_checkpoint(path, keep)
            keep |= self._uploads.in_use
        self._series.committed(path, keep)
        self._event_log.event("saved", checkpoint=path.name)

    def _finish_pending(self) -> None:
        """Wait for the pending save, if any, and record its outcome, the same on every rank."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        problem = pending.outcome()
        # Ranks time out by their own clocks: one may have timed out just before the save completed on another.
        (failed,) = self._backend.any_rank(problem is not None)
        self._saved = not failed
        if not failed:
            self._on_save(pending.path)
        else:
            self._failed(problem or f"save: {pending.path} was not complete in time on another rank")

    def _failed(self, problem: str) -> None:
        self._pending, self._saved, self.problem = None, False, problem
        self._last_step = -1  # there is no checkpoint of that step: finish() tries once more
        self._event_log.event("save_failed", problem=problem)
        # On every rank: all have the same outcome.
        if self._settings.on_failure == "stop":
            raise CheckpointError(problem)
        if self._backend.rank == 0:
            logger.warning("%s; training continues (checkpoint.on_failure: continue)", problem)
