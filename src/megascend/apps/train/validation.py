"""What a supervised run measures beside its steps: the loss on held-out samples, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import functools
import logging
import operator
import time
from typing import TYPE_CHECKING

from megascend.apps.data.chat import ChatTemplate
from megascend.apps.data.prepare import json_digest
from megascend.apps.train.learner import Run
from megascend.apps.train.objectives import LearningObjective, Scoring
from megascend.apps.train.records import TrainCounts
from megascend.apps.train.run_log import RunLog, rounded
from megascend.apps.train.task_scorer import TaskScorer
from megascend.config import RunConfig
from megascend.config.data import PREFERENCE_LOSSES, Validation
from megascend.runtime.stop_signals import MeasurementStopped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.train.harness import TaskSuite
    from megascend.apps.train.run_samples import RunSamples
    from megascend.apps.train.task_scorer import TaskScores

logger = logging.getLogger(__name__)


class Validator:
    """Measures a run as ``validation`` says, and keeps the best value in the run's counts. Every method is collective."""

    def __init__(
        self,
        settings: Validation,
        run: Run[RunConfig],
        samples: RunSamples,
        objective: LearningObjective,
        tokenizer: PreTrainedTokenizerBase,
        suite: TaskSuite | None,
        counts: TrainCounts,
        log: RunLog,
    ) -> None:
        """
        Args:
            suite: the tasks, on rank 0.
        """
        self._settings, self._run, self._samples, self._objective = settings, run, samples, objective
        self._suite, self._counts, self._log = suite, counts, log
        self._tasks: TaskScorer | None = None
        self._unshown: TaskScores | None = None
        if settings.tasks is not None:
            template = ChatTemplate(tokenizer, run.config.data.chat_template_options, run.config.template_date)
            self._tasks = TaskScorer(
                *(run.backend, tokenizer, run.config.model, settings.tasks, run.adapter, template),
                before_batch=self._check_stop,
            )
        self._reset_incomparable_best()

    def measure(self, step: int) -> tuple[float | None, dict[str, float]]:
        """Measure what is due after ``step``; return the validation loss (None: not due) and metrics.

        Raises:
            MeasurementStopped: nothing of it counts: a resumed run measures all of it.
        """
        settings, last = self._settings, step == self._run.config.steps
        loss, metrics, scores = None, {}, None
        if self._samples.held_out is not None and (step % settings.every == 0 or last):
            loss, metrics = self._held_out_figures()
        if self._tasks is not None and (step % settings.tasks_interval == 0 or last):
            scores = self._measure_tasks(self._tasks, step)
            metrics = metrics | {f"tasks/{name}": value for name, value in scores.values.items()}
        add = functools.partial(self._counts.add_measurement, step=step, min_delta=settings.min_delta)
        if loss is not None:
            self._counts.validation_loss = loss
            if settings.metric == "loss":
                add(loss)
            elif settings.needs_labels:
                add(metrics[f"validation_{settings.metric}"], higher_is_better=True)
        if scores is not None and settings.metric != "loss":
            value, higher = scores.metric(settings.metric)
            add(value, higher_is_better=higher)
        self._unshown = scores
        return loss, metrics

    def measure_late(self, step: int) -> None:
        """Measure what a signal stopped after ``step``, and add it to that step's line in metrics.jsonl."""
        loss, metrics = self.measure(step)
        self._counts.measurement_due = False
        self._log.complete_last(step, {"validation_loss": loss, **metrics})
        if loss is not None and self._run.main_rank:
            print(f"validation loss after step {step}: {loss:.4f}", flush=True)
        self.show_tasks(f"after step {step}")

    def measure_initial_model(self) -> None:
        """Measure the model before the first step; it does not count as the best one."""
        if self._samples.held_out is not None:
            loss, metrics = self._held_out_figures()
            self._run.event_log.event("validated", step=0, validation_loss=loss, **metrics)
            if self._run.main_rank:
                print(f"validation loss before the first step: {loss:.4f}", flush=True)
        if self._tasks is not None:
            scores = self._measure_tasks(self._tasks, 0)
            if self._settings.metric != "loss":
                scores.metric(self._settings.metric)  # raises for an unknown metric now, not after many steps
            self._unshown = scores
            self.show_tasks("before the first step")

    def show_tasks(self, time_of_measurement: str) -> None:
        """Show the metrics of the last measurement of tasks, once: below the line of its step."""
        if self._unshown is not None:
            lines = "\n".join(f"  {line}" for line in self._unshown.lines())
            self._log.show_text(f"tasks {time_of_measurement}:\n{lines}")
        self._unshown = None

    def _check_stop(self) -> None:
        """Raise MeasurementStopped on all ranks once any of them has received a signal."""
        if self._run.backend.any_rank(self._run.stop)[0]:
            raise MeasurementStopped

    def _held_out_figures(self) -> tuple[float, dict[str, float]]:
        """Measure the loss on the held-out samples; also return their metrics, and the loss of each source."""
        run = self._run
        scoring = Scoring(run.adapter, run.config.data.global_batch_size, self._check_stop)
        parts = self._samples.held_out_parts(run.config)
        measured = {name: self._objective.measure(run.backend, part, scoring) for name, part in parts.items()}
        total = functools.reduce(operator.add, measured.values())
        figures = {f"validation_{name}": value for name, value in total.metrics.items()}
        if len(measured) > 1:
            figures |= {f"validation_loss/{name}": part.loss for name, part in measured.items()}
        return total.loss, figures

    def _measure_tasks(self, scorer: TaskScorer, step: int) -> TaskScores:
        """Measure the tasks with the weights after ``step``, and record their metrics."""
        since = time.perf_counter()
        scores = scorer.measure(self._suite)
        seconds = round(time.perf_counter() - since, 3)
        self._run.event_log.event(
            "tasks_measured", step=step, seconds=seconds, documents=scores.documents, metrics=rounded(scores.values)
        )
        return scores

    def _reset_incomparable_best(self) -> None:
        """Reset the best value if the checkpoint's measurements cannot be compared with those of this run."""
        counts, digest = self._counts, self._metric_digest()
        if counts.best_value is not None and counts.measure not in (None, digest):
            message = (
                f"step {counts.best_step} with {counts.best_value:.4f} no longer counts as the best one: validation.metric, or "
                "what it is measured with, has changed since; the best step is chosen from the steps of this run"
            )
            self._run.event_log.event("best_forgotten", step=counts.best_step, value=counts.best_value)
            if self._run.main_rank:
                logger.warning(message)
            counts.best_value, counts.best_step, counts.stale = None, None, 0
        counts.measure = digest

    def _metric_digest(self) -> str:
        """Return a digest of ``validation.metric`` and what its values depend on besides the model."""
        settings, held_out = self._settings, self._samples.held_out
        if settings.metric != "loss" and not settings.needs_labels and settings.tasks is not None:
            return json_digest([settings.metric, settings.tasks.model_dump(mode="json", exclude={"interval"})])
        sections = {"loss", "loss_settings", *PREFERENCE_LOSSES, "classification", "distillation"}
        loss = self._run.config.model_dump(mode="json", include=sections)
        return json_digest([settings.metric, None if held_out is None else held_out.fingerprint, loss])
