"""Supervised training from a :class:`RunConfig`: what ``megascend train`` runs on every rank."""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from megascend.apps.train.learner import Run, RunContext, Training, model_line, too_many_skips
from megascend.apps.train.loop import run
from megascend.apps.train.preflight import RunPlan
from megascend.apps.train.resume import saved_manifests, with_template_date
from megascend.apps.train.run_log import EMPTY, MetricsRecord, RunLog, rounded
from megascend.config import RunConfig
from megascend.config.data import PREFERENCE_LOSSES, Validation
from megascend.errors import EvaluationError
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.paths import make_directory
from megascend.runtime.stop_signals import MeasurementStopped
from megascend.training.batch.metrics import Metric

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.data.order import Batches
    from megascend.apps.data.streaming import PrefetchedBatches
    from megascend.apps.train.generation import AnswerSampler
    from megascend.apps.train.harness import TaskSuite
    from megascend.apps.train.objectives import LearningObjective
    from megascend.apps.train.run_samples import RunSamples
    from megascend.apps.train.task_scorer import TaskScorer, TaskScores
    from megascend.apps.train.token_budget import TokenBudget
    from megascend.backend import Backend
    from megascend.training.batch.sample import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """Result of a run, the same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        loss: loss of the last step.
        tokens: input tokens over all ranks and steps.
        seconds: duration from the first step to the last, without start-up and export.
        skipped_steps: steps that a non-finite gradient made all ranks skip.
        output: the run directory.
        export: directory of the exported model, or of the adapter if one was trained, or None.
        stopped: the signal that stopped the run before its last step (``"SIGTERM"``), or None. A checkpoint was saved.
        validation_loss: the last one that was measured, or None.
    """

    steps: int
    loss: float
    tokens: int
    seconds: float
    skipped_steps: int
    output: Path
    export: Path | None
    stopped: str | None = None
    validation_loss: float | None = None


def train(
    config: RunConfig,
    *,
    overwrite: bool = False,
    resume: str | Path | None = None,
    plan: RunPlan[RunConfig] | None = None,
) -> TrainResult:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 writes to ``config.output``: metrics.jsonl and the TensorBoard log step by step; config.yaml, the exported
    model in hf/ (or, with ``lora``, the adapter in peft's format in adapter/) and metrics.png each complete or not at all. A
    directory that holds an earlier run is refused before anything starts, unless ``overwrite``; the earlier run's files are then
    removed, but only after this run's first step. Signals (:mod:`megascend.runtime.stop_signals`) end a run after
    its present step, with a checkpoint; output that cannot be written (:mod:`megascend.runtime.io.lasting_output`) does not.

    Args:
        resume: ``"auto"``: resume from the newest checkpoint in ``config.output`` that is complete, if there is any. A path: from
            that checkpoint, or the newest of that run.
        plan: result of :func:`megascend.apps.train.preflight.preflight` for ``config``; None: it was not called on this host.

    Raises:
        ConfigError: the output directory holds a run, or a setting cannot work, ``lora.targets`` or ``trackers`` for example.
        MissingDependencyError: ``plot`` is set, or a tracker is named, and its package is not installed.
        DataError: the data cannot be trained on; the message names file and line.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
        CheckpointError: there is no checkpoint to resume from, each is damaged, or one could not be written.
    """
    training = SupervisedTraining()
    result = run(training, config, overwrite, resume, plan)
    counts = training.counts
    return TrainResult(
        steps=result.steps,
        loss=counts.loss,
        tokens=counts.tokens,
        seconds=counts.seconds,
        skipped_steps=counts.skipped,
        output=config.output,
        export=result.export,
        stopped=result.stopped,
        validation_loss=counts.validation_loss,
    )


@dataclass
class TrainCounts:
    """Totals of a run, including the steps before it was resumed.

    Attributes:
        tokens: input tokens of all ranks.
        skipped: steps that all ranks skipped.
        seconds: time spent in steps, on this rank.
        loss: loss of the last step.
        validation_loss: the last one that was measured.
        best_value, best_step: the best value of ``validation.metric`` so far, and its step; None before the first measurement.
        stale: measurements since then.
        measure: digest of what the best value depends on, see :meth:`SupervisedTraining._metric_digest`; None without a metric,
            or in a checkpoint of an earlier version.
        measurement_due: a signal stopped what was to be measured after the last step.
    """

    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    validation_loss: float | None = None
    best_value: float | None = None
    best_step: int | None = None
    stale: int = 0
    measure: str | None = None
    measurement_due: bool = False

    def add_measurement(self, value: float, *, step: int, min_delta: float, higher_is_better: bool = False) -> None:
        """Record a value of ``validation.metric``. One that is not finite is no improvement."""
        sign = -1 if higher_is_better else 1
        if math.isfinite(value) and (self.best_value is None or sign * (value - self.best_value) < -min_delta):
            self.best_value, self.best_step, self.stale = value, step, 0
        else:
            self.stale += 1


class SupervisedTraining(Training[RunConfig]):
    """Learning from tokens, or from preference pairs.

    Attributes:
        samples, objective: training data and its loss; set by :meth:`prepare`.
    """

    progress_keys = ("data", "counts")
    shared_errors = (EvaluationError,)
    samples: RunSamples
    objective: LearningObjective
    _tokenizer: PreTrainedTokenizerBase
    _resume: str | Path | None
    _run: Run[RunConfig]
    _stream: Batches[int] | PrefetchedBatches
    _budget: TokenBudget
    _log: RunLog

    def __init__(self) -> None:
        self.counts = TrainCounts()
        self._answer_sampler: AnswerSampler | None = None
        self._task_suite: TaskSuite | None = None
        self._task_scorer: TaskScorer | None = None
        self._task_scores: TaskScores | None = None
        self._stream_state: dict[str, Any] = {}
        self._skipped_in_a_row = self._last_step = 0
        self._batch: Sequence[Sample] = ()
        self._step_start = 0.0

    def prepare(self, context: RunContext[RunConfig]) -> RunConfig:
        from megascend.apps.data.prepare import set_template
        from megascend.apps.train.generation import AnswerSampler
        from megascend.apps.train.objectives import make_objective
        from megascend.apps.train.run_samples import RunSamples
        from megascend.apps.train.teacher_model import check_context, check_teacher_model
        from megascend.apps.train.token_budget import check_platform

        plan, config = context.plan, context.plan.config
        self._resume = context.resume
        # Before the data, which may take minutes to read.
        check_platform(config, context.runtime.platform)
        tokenizer, limits = plan.tokenizer, plan.limits
        self._tokenizer = tokenizer
        # Set on the tokenizer, and kept for the export: the model must be used with the template that it was trained with.
        self.chat_template = set_template(config.data, tokenizer)
        config = with_template_date(config, tokenizer, context.resume, context.launch)
        self.samples = RunSamples.prepare(config, tokenizer, limits)
        self.ends = self.samples.ends
        if config.generation is not None:
            self._answer_sampler = AnswerSampler.prepare(
                config.generation, config.data, tokenizer, limits, config.model, config.template_date
            )
        if config.validation is not None and config.validation.tasks is not None and context.launch.rank == 0:
            from megascend.apps.train.harness import TaskSuite

            self._task_suite = TaskSuite(config.validation.tasks, "validation.tasks")
            if config.validation.metric != "loss":
                self._task_suite.check_metric(config.validation.metric)
        self.objective = make_objective(config, self.samples.train)
        distillation = config.distillation
        if distillation is not None and distillation.teacher is not None:
            check_teacher_model(config, distillation.teacher, "distillation.teacher", plan.info, tokenizer)
            check_context(distillation.teacher, "distillation.teacher", limits)
        self._longest_unit = self.samples.longest_unit(plan.layout)
        return config.for_samples(self.objective.units(self.samples.train))

    def model_config(self, config: RunConfig) -> RunConfig:
        from megascend.apps.train.token_budget import with_first_budget

        return with_first_budget(config, self._longest_unit)

    def after_build(self, run: Run[RunConfig]) -> None:
        config, backend, samples, objective = run.config, run.backend, self.samples, self.objective
        # Every host reads its own files. If they differed, ranks would silently train on different batches.
        samples.check_same_on_all_ranks(backend)
        samples.check_lengths(backend)
        size = config.data.global_batch_size
        saved: list[tuple[int, dict[str, Any]]] = []
        if objective.has_reference:
            # With another batch size or changed data, a resumed run draws other samples than a run from the beginning.
            resume, launch = self._resume, backend.groups.launch
            saved = backend.from_rank_0(lambda: saved_positions(config.output, resume, launch))
        objective.prepare(backend, samples.train, samples.drawn_units(config, objective, saved), size)
        # The validation set needs a reference model's scores, too: before the first step changes the model, which is the
        # reference.
        if samples.held_out is not None:
            objective.prepare(backend, samples.held_out, range(objective.units(samples.held_out)), size)

    def begin(self, run: Run[RunConfig], progress: dict[str, Any] | None, stop: Callable[[], bool]) -> None:
        from megascend.apps.train.token_budget import TokenBudget

        config, self._run = run.config, run
        self._last_step = run.backend.step_count

        def check_stop() -> None:
            if run.backend.any_rank(stop())[0]:
                raise MeasurementStopped

        self.objective.before_batch = check_stop
        self._stream = self.samples.batches(config, self.objective)
        run.stack.callback(self._stream.close)
        if progress is not None:
            self._stream.load_state_dict(progress["data"])
            if changes := self._stream.changes:
                run.event_log.event("samples_changed", changes=changes)
                if run.main_rank:
                    logger.warning("data.on_changed: continue: %s", changes)
            self.counts = TrainCounts(**progress["counts"])
        self._reset_incomparable_best(run)
        self._stream_state = self._stream.state_dict()
        if config.validation is not None and config.validation.tasks is not None:
            from megascend.apps.data.chat import ChatTemplate
            from megascend.apps.train.task_scorer import TaskScorer

            tokenizer = self._tokenizer
            template = ChatTemplate(tokenizer, config.data.chat_template_options, config.template_date)
            self._task_scorer = TaskScorer.prepare(
                *(run.backend, tokenizer, config.model, config.validation.tasks, run.adapter, template),
                before_batch=check_stop,
            )
        self._budget = TokenBudget(config)
        self._budget.apply(
            config,
            run.backend,
            self.samples,
            self.objective,
            run.adapter,
            (progress or {}).get("budget"),
            run.event_log,
        )
        if run.main_rank:
            self._print_start(run)

    def _reset_incomparable_best(self, run: Run[RunConfig]) -> None:
        """Reset the best value if the checkpoint's measurements cannot be compared with those of this run."""
        counts, digest = self.counts, self._metric_digest(run.config)
        if counts.best_value is not None and digest is not None and counts.measure not in (None, digest):
            message = (
                f"step {counts.best_step} with {counts.best_value:.4f} no longer counts as the best one: validation.metric, or "
                "what it is measured with, has changed since; the best step is chosen from the steps of this run"
            )
            run.event_log.event("best_forgotten", step=counts.best_step, value=counts.best_value)
            if run.main_rank:
                logger.warning(message)
            counts.best_value, counts.best_step, counts.stale = None, None, 0
        counts.measure = digest

    def _metric_digest(self, config: RunConfig) -> str | None:
        """Return a digest of ``validation.metric`` and what its values depend on besides the model; None without validation."""
        from megascend.apps.data.prepare import json_digest

        validation, held_out = config.validation, self.samples.held_out
        if validation is None:
            return None
        if validation.metric != "loss" and not validation.needs_labels and validation.tasks is not None:
            return json_digest([validation.metric, validation.tasks.model_dump(mode="json", exclude={"interval"})])
        sections = {"loss", "loss_settings", *PREFERENCE_LOSSES, "classification", "distillation"}
        loss = config.model_dump(mode="json", include=sections)
        return json_digest([validation.metric, None if held_out is None else held_out.fingerprint, loss])

    def _print_start(self, run: Run[RunConfig]) -> None:
        """Print the model, the data, remarks on the settings, and the verdict of the self-check."""
        config, backend = run.config, run.backend
        print(f"{model_line(config, backend)}: {self._description(run)}", flush=True)
        for line in (*self.samples.remarks, *self.samples.mixture(config, self._stream)):
            print(f"data: {line}", flush=True)
        for line in config.template_remarks():
            print(line, flush=True)
        for line in config.schedule_remarks():
            logger.warning(line)
        if backend.self_check is not None:
            print(backend.self_check.summary(), flush=True)

    def start_loop(self, log: RunLog) -> None:
        self._log, self._run.backend.on_micro_batch = log, log.micro_batch
        validation, number = self._run.config.validation, self._run.backend.step_count
        try:
            if self.counts.measurement_due:
                self._validate_again(number)
            elif validation is not None and validation.at_start and number == 0:
                self._validate_at_start(validation)
        except MeasurementStopped:
            self.measurement_stopped = True
        self._step_start = time.perf_counter()

    def _validate_again(self, number: int) -> None:
        """Measure what a signal stopped after step ``number``, and add it to that step's line in metrics.jsonl."""
        loss, metrics = self._validate(number)
        self.counts.measurement_due = False
        self._log.complete_last(number, {"validation_loss": loss, **metrics})
        if loss is not None and self._run.main_rank:
            print(f"validation loss after step {number}: {loss:.4f}", flush=True)
        self._show_tasks(f"after step {number}")

    def _validate_at_start(self, validation: Validation) -> None:
        """Measure the model before the first step; it does not count as the best one."""
        if self.samples.held_out is not None:
            loss, metrics = self._validation_figures()
            self._run.event_log.event("validated", step=0, validation_loss=loss, **metrics)
            if self._run.main_rank:
                print(f"validation loss before the first step: {loss:.4f}", flush=True)
        if self._task_scorer is not None:
            scores = self._measure_tasks(self._task_scorer, 0)
            if validation.metric != "loss":
                scores.metric(validation.metric)  # raises for an unknown metric now, not after many steps
            self._show_tasks("before the first step")

    @property
    def finished(self) -> bool:
        validation = self._run.config.validation
        return validation is not None and 0 < validation.patience <= self.counts.stale

    @property
    def best_step(self) -> int | None:
        validation = self._run.config.validation
        return self.counts.best_step if validation is not None and validation.keep_best else None

    def next_batch(self, number: int, stop: Callable[[], bool]) -> list[Sample] | None:
        if self.measurement_stopped:  # before the first step
            return None
        return self.samples.next_batch(self._stream, self.objective, self._run.backend)

    def step(self, number: int, batch: Sequence[Sample]) -> StepRecord:
        """Train on a batch, and validate where that is due."""
        from megascend.training.batch.images import decode_together

        run, objective, counts = self._run, self.objective, self.counts
        backend = run.backend
        share = backend.shard(batch)
        # This rank's images only, on several threads: the checks in forward_backward would decode one after the other.
        decode_together([sample.images for sample in share])
        share = objective.complete(backend, share, run.adapter)
        result = backend.forward_backward(share, loss=objective.loss, adapter=run.adapter)
        # On a GPU the host runs ahead: until here it has launched the kernels; in the rest of the step it waits for the device.
        dispatched = time.perf_counter() - self._step_start
        step = backend.optimizer_step()
        # Updated at once: if an error follows, a checkpoint of this step is saved with these counts.
        seconds = time.perf_counter() - self._step_start
        self._batch, self._skipped_in_a_row = batch, step.skipped_in_a_row
        self._stream_state = self._stream.state_dict()
        counts.tokens += result.total_tokens
        counts.skipped += step.skipped
        counts.seconds += seconds
        counts.loss, self._last_step = result.loss, number
        try:
            validation_loss, metrics = self._validate(number)
        except MeasurementStopped:
            validation_loss, metrics = None, {}
            self.measurement_stopped = counts.measurement_due = True
        tokens_per_s = result.total_tokens / seconds
        return StepRecord(
            step=number,
            loss=result.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens=result.tokens,
            total_tokens=result.total_tokens,
            tokens_per_s=tokens_per_s,
            skipped=step.skipped,
            epoch=self._stream.epochs,
            peak_memory_bytes=backend.platform.memory().peak,
            step_seconds=seconds,
            dispatch_seconds=dispatched,
            seconds=counts.seconds,
            mfu=model_flops_utilisation(tokens_per_s, batch, backend),
            validation_loss=validation_loss,
            metrics={**result.metrics, **metrics},
        )

    def _validate(self, number: int) -> tuple[float | None, dict[str, float]]:
        """Measure what is due after step ``number``; return the validation loss (None: not due) and metrics. Collective."""
        config, counts = self._run.config, self.counts
        validation, last = config.validation, number == config.steps
        if validation is None:
            return None, {}
        loss, metrics, scores = None, {}, None
        if self.samples.held_out is not None and (number % validation.every == 0 or last):
            loss, metrics = self._validation_figures()
        if self._task_scorer is not None and (number % validation.tasks_interval == 0 or last):
            scores = self._measure_tasks(self._task_scorer, number)
            metrics = metrics | {f"tasks/{name}": value for name, value in scores.values.items()}
        # After all measurements: if a signal stops one of them, a resumed run repeats all.
        add_measurement = functools.partial(counts.add_measurement, step=number, min_delta=validation.min_delta)
        if loss is not None:
            counts.validation_loss = loss
            if validation.metric == "loss":
                add_measurement(loss)
            elif validation.needs_labels:
                add_measurement(metrics[f"validation_{validation.metric}"], higher_is_better=True)
        if scores is not None and validation.metric != "loss":
            value, higher = scores.metric(validation.metric)
            add_measurement(value, higher_is_better=higher)
        return loss, metrics

    def _validation_figures(self) -> tuple[float, dict[str, float]]:
        """Measure the loss on the held-out samples; also return their metrics, and the loss of each source. Collective."""
        run, size = self._run, self._run.config.data.global_batch_size
        parts = self.samples.held_out_parts(run.config)
        measured = {name: self.objective.measure(run.backend, part, run.adapter, size) for name, part in parts.items()}
        total = functools.reduce(operator.add, measured.values())
        figures = {f"validation_{name}": value for name, value in total.metrics.items()}
        if len(measured) > 1:
            figures |= {f"validation_loss/{name}": part.loss for name, part in measured.items()}
        return total.loss, figures

    def _measure_tasks(self, scorer: TaskScorer, step: int) -> TaskScores:
        """Measure the tasks with the weights after ``step``, and record their metrics. Collective."""
        since = time.perf_counter()
        self._task_scores = scores = scorer.measure(self._task_suite)
        seconds = round(time.perf_counter() - since, 3)
        self._run.event_log.event(
            "tasks_measured", step=step, seconds=seconds, documents=scores.documents, metrics=rounded(scores.values)
        )
        return scores

    def _show_tasks(self, time_of_measurement: str) -> None:
        """Show the metrics of the last measurement of tasks, once."""
        if self._task_scores is not None:
            lines = "\n".join(f"  {line}" for line in self._task_scores.lines())
            self._log.show_text(f"tasks {time_of_measurement}:\n{lines}")
        self._task_scores = None

    def after_step(self, number: int) -> None:
        """Stop after too many skipped steps in a row; sample answers to the run's prompts where that is due."""
        self._show_tasks(f"after step {number}")
        run, answer_sampler = self._run, self._answer_sampler
        config, backend = run.config, run.backend
        # Checked after the step is logged, so that metrics.jsonl ends with the skipped steps.
        if self._skipped_in_a_row > config.max_skipped_steps:
            path = save_batch(config, number, self._batch) if self._log.writes else None
            raise too_many_skips(config, number, self._skipped_in_a_row, path)
        last = number if self.finished else config.steps
        if answer_sampler is not None and answer_sampler.due(number, last):
            since = time.perf_counter()
            answers = answer_sampler.answer(backend, run.adapter)
            seconds = round(time.perf_counter() - since, 3)
            run.event_log.event("answered", step=number, seconds=seconds, answers=[vars(answer) for answer in answers])
            self._log.write_texts(number, {answer.prompt: answer.text for answer in answers})
        self._step_start = time.perf_counter()

    def progress(self) -> dict[str, Any]:
        return {"data": self._stream_state, "counts": vars(self.counts), "budget": self._budget.state_dict()}

    def weights(self, config: RunConfig) -> dict[str, Path]:
        """Return the directories of base model and teacher, unless a checkpoint contains them."""
        weights = super().weights(config)
        if self.objective.has_reference:  # the model that training starts from
            weights["model"] = config.model
        if config.distillation is not None and config.distillation.teacher is not None:
            weights["distillation.teacher"] = config.distillation.teacher
        return weights

    def code(self, config: RunConfig) -> dict[str, str]:
        """Return the names of plug-ins and of the loss function."""
        functions = {} if config.loss is None or ":" not in config.loss else {"loss": config.loss}
        return super().code(config) | functions

    def title(self, run: Run[RunConfig]) -> str:
        return f"{model_line(run.config, run.backend)}\n{self._description(run)}"

    def _description(self, run: Run[RunConfig]) -> str:
        """Return a one-line description of the data, the number of steps and the devices."""
        config, backend = run.config, run.backend
        ranks = f"{backend.world_size} rank{'s' if backend.world_size > 1 else ''} on {backend.platform.name}"
        lora = f"LoRA of rank {config.lora.rank}, " if config.lora is not None else ""
        units = f" {self.samples.train.unit}" if self.samples.train.members > 1 else ""
        steps = f"{config.steps} steps of {config.data.global_batch_size}{units}"
        precision = config.precision + (" with TF32 products" if config.tf32 else "")
        return f"{lora}{self.samples.describe()}, {steps}; {precision}; {ranks}"

    def result(self) -> tuple[dict[str, Any], str]:
        sources = self._run.config.data.training_sources()
        passes = {
            str(source.path): round(epochs, 4)
            for source, epochs in zip(sources, self._stream.source_epochs, strict=True)
        }
        values = {"loss": self.counts.loss, "epochs": passes}
        line = end_line(self._run.config, self.counts, self._last_step)
        if self._run.config.data.streaming:
            stream: Any = self._stream
            values["bad_records"] = stream.bad_records
            # A stream's remarks are known at its end only; those of other data are printed at the start.
            line = "".join(f"data: {remark}\n" for remark in stream.remarks) + line
            if stream.bad_records:
                line += f"; {stream.bad_records} bad records were skipped (data.max_bad_records)"
        return values, line


def saved_positions(output: Path, resume: str | Path | None, launch: Launch) -> list[tuple[int, dict[str, Any]]]:
    """Return step and position in the data of each checkpoint that a run may resume from."""
    manifests = saved_manifests(output, resume, launch)
    return [(saved.step, saved.progress["data"]) for saved in manifests if "data" in saved.progress]


def end_line(config: RunConfig, counts: TrainCounts, steps: int | None = None) -> str:
    """Return a one-line summary of the run.

    Args:
        steps: the last step; default: all of them are done.
    """
    skipped = f", {counts.skipped} of them skipped (non-finite gradients)" if counts.skipped else ""
    validated = f", validation loss {counts.validation_loss:.4f}" if counts.validation_loss is not None else ""
    steps, early = config.steps if steps is None else steps, ""
    if steps < config.steps and counts.best_value is not None:
        metric = "loss" if config.validation is None else config.validation.metric
        measured = "validation losses" if metric == "loss" else f"measurements of {metric}"
        early = (
            f" (of {config.steps}: the last {counts.stale} {measured} were no improvement on step {counts.best_step}'s "
            f"{counts.best_value:.4f})"
        )
    length = f"{steps} step{'s' if steps != 1 else ''}{early} in {counts.seconds:.0f} s"
    return f"{length}{skipped}, last loss {counts.loss:.4f}{validated}; see {config.output}"


def model_flops_utilisation(tokens_per_s: float, batch: Sequence[Sample], backend: Backend) -> float | None:
    """Return model FLOP/s over the bf16 peak of all devices, or None where that is not known."""
    peak = backend.platform.peak_flops()
    if peak is None:
        return None
    # The attention cost of a token is proportional to the length of its sequence: average lengths over tokens, not samples.
    length = sum(len(sample) ** 2 for sample in batch) / sum(len(sample) for sample in batch)
    return tokens_per_s * backend.flops_per_token(round(length)) / (peak * backend.world_size)


def save_batch(config: RunConfig, step: int, batch: Sequence[Sample]) -> Path | None:
    """Write the samples of a step with non-finite gradients, for debugging; None if they cannot be written."""
    path = config.output / "non_finite" / f"step-{step}.jsonl"
    fields = ("input_ids", "target_ids", "weights")
    try:
        make_directory(path.parent)
        path.write_text(
            "".join(json.dumps({name: getattr(s, name).tolist() for name in fields}) + "\n" for s in batch),
            encoding="utf-8",
        )
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        return None
    return path


@dataclass(frozen=True)
class StepRecord(MetricsRecord):
    """A step of supervised training. ``loss`` and ``grad_norm`` are null where they are not finite.

    Attributes:
        metrics: further metrics of the loss, by name, and ``validation_NAME`` of those measured on held-out pairs;
            ``LOSS_METRICS`` declares those of built-in losses.
    """

    loss: Annotated[
        float, Metric("nats", "mean loss per trained token (of preference losses: per pair or labelled sample)")
    ]
    grad_norm: Annotated[float, Metric("", "global gradient norm before clipping")]
    lr: Annotated[float, Metric("", "learning rate of the update")]
    tokens: Annotated[int, Metric("tokens", "tokens of the step that carry loss, over all ranks")]
    total_tokens: Annotated[int, Metric("tokens", "input tokens of the step, over all ranks")]
    tokens_per_s: Annotated[float, Metric("tokens/s", "total_tokens divided by step_seconds")]
    epoch: Annotated[float, Metric("epochs", "passes over the data after this step")]
    peak_memory_bytes: Annotated[
        int, Metric("bytes", "peak device memory of rank 0 since the run began; 0 if the platform does not report it")
    ]
    step_seconds: Annotated[float, Metric("s", "duration of the step on rank 0")]
    dispatch_seconds: Annotated[
        float,
        Metric(
            "s",
            "part of step_seconds in which rank 0 issued the forward and backward passes. On a GPU or NPU, a "
            "value near step_seconds means that the device waits for Python; on a CPU it is the work itself",
        ),
    ]
    mfu: Annotated[
        float | None,
        Metric(
            "", "model FLOPs utilisation: model FLOP/s divided by the devices' bf16 peak; null if either is unknown"
        ),
    ] = None
    validation_loss: Annotated[
        float | None, Metric("as loss", "loss on the held-out samples after the step; null where it was not measured")
    ] = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    at_intervals = ("validation_loss",)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, with each of ``metrics`` under its own name."""
        values = super().to_dict()
        return values | values.pop("metrics")

    def progress(self) -> str:
        """Return the number of passes over the data."""
        return f"epoch {self.epoch:.2f}  "

    def summary(self, earlier: Mapping[str, tuple[int, float]] = EMPTY) -> str:
        """Return the figures of a step in one short line."""
        figures = [
            f"loss {self.loss:.4f}",
            f"accuracy {self.metrics['accuracy']:.3f}" if "accuracy" in self.metrics else "",
            self.last_measured("validation_loss", "validation", 4, earlier),
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_s:,.0f} tokens/s",
            "" if self.mfu is None else f"MFU {self.mfu:.1%}",
            "SKIPPED" if self.skipped else "",
        ]
        return "  ".join(filter(None, figures))
