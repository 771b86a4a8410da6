"""Learning from tokens, preference pairs or labelled samples: the data of a supervised run, and its learner."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.data.prepare import set_template
from megascend.apps.data.streaming import PrefetchedBatches
from megascend.apps.train.generation import AnswerSampler
from megascend.apps.train.learner import Learner, Run, RunContext, RunData, model_line
from megascend.apps.train.objectives import LearningObjective, TeacherObjective, make_objective
from megascend.apps.train.records import StepRecord, TrainCounts, end_line
from megascend.apps.train.resume import saved_manifests, with_template_date
from megascend.apps.train.run_inputs import InputNames
from megascend.apps.train.run_log import RunLog
from megascend.apps.train.run_samples import RunSamples
from megascend.apps.train.teacher_model import TeacherModel, check_context, check_teacher_model
from megascend.apps.train.token_budget import apply_budget, check_platform, with_first_budget
from megascend.apps.train.validation import Validator
from megascend.config import RunConfig
from megascend.errors import EvaluationError
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.paths import make_directory
from megascend.runtime.stop_signals import MeasurementStopped
from megascend.surroundings import announce
from megascend.training.batch.images import decode_together
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.train.harness import TaskSuite
    from megascend.backend import Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedData(RunData[RunConfig]):
    """Samples of a run, and what is measured on its way.

    Attributes:
        answer_sampler: prompts of ``generation``, or None.
        task_suite: tasks of ``validation``, on rank 0, or None.
        longest_unit: tokens of the longest sample or pair, padding included.
    """

    progress_keys = ("data", "counts")
    config: RunConfig
    chat_template: str | None
    ends: Collection[int]
    resume: str | Path | None
    tokenizer: PreTrainedTokenizerBase
    samples: RunSamples
    objective: LearningObjective
    answer_sampler: AnswerSampler | None
    task_suite: TaskSuite | None
    longest_unit: int

    @classmethod
    def read(cls, context: RunContext[RunConfig]) -> SupervisedData:
        """Read the data of a run; see :meth:`megascend.apps.train.learner.RunKind.read`."""
        plan, config = context.plan, context.plan.config
        # Before the data, which may take minutes to read.
        check_platform(config, context.runtime.platform)
        tokenizer, limits = plan.tokenizer, plan.limits
        # Set on the tokenizer, and kept for the export: the model must be used with the template that it was trained with.
        chat_template = set_template(config.data, tokenizer)
        config = with_template_date(config, tokenizer, context.resume, context.launch)
        samples = RunSamples.prepare(config, tokenizer, limits)
        answer_sampler = task_suite = None
        if config.generation is not None:
            answer_sampler = AnswerSampler.prepare(
                config.generation, config.data, tokenizer, limits, config.model, config.template_date
            )
        if config.validation is not None and config.validation.tasks is not None and context.launch.rank == 0:
            from megascend.apps.train.harness import TaskSuite

            task_suite = TaskSuite(config.validation.tasks, "validation.tasks")
            if config.validation.metric != "loss":
                task_suite.check_metric(config.validation.metric)
        objective = make_objective(config, samples.train)
        if config.distillation is not None and config.distillation.teacher is not None:
            teacher = config.distillation.teacher
            check_teacher_model(config, teacher, "distillation.teacher", plan.info, tokenizer)
            check_context(teacher, "distillation.teacher", limits)
        units = objective.units(samples.train)
        config = config.for_samples(units)
        if (last_step := config.last_step(units)) is not None:
            announce(last_step)
        return cls(
            config=config,
            chat_template=chat_template,
            ends=samples.ends,
            resume=context.resume,
            tokenizer=tokenizer,
            samples=samples,
            objective=objective,
            answer_sampler=answer_sampler,
            task_suite=task_suite,
            longest_unit=samples.longest_unit(plan.layout),
        )

    @property
    def model_config(self) -> RunConfig:
        return with_first_budget(self.config, self.longest_unit)

    @property
    def inputs(self) -> InputNames:
        return input_names(self.config, has_reference=self.objective.has_reference)

    def evaluate_initial_model(self, run: Run[RunConfig]) -> LearningObjective:
        """Check the samples with the model, score them with it if it is the reference of the loss, and read a teacher.

        Returns:
            The objective, with its models.
        """
        config, backend, samples = run.config, run.backend, self.samples
        objective, distillation = self.objective, config.distillation
        if distillation is not None and distillation.teacher is not None:
            teacher = TeacherModel(backend, distillation.teacher, "distillation.teacher")
            objective = TeacherObjective(distillation, teacher)
        # Every host reads its own files. If they differed, ranks would silently train on different batches.
        samples.check_same_on_all_ranks(backend)
        samples.check_lengths(backend)
        if objective.has_reference:
            # With another batch size or changed data, a resumed run draws other samples than a run from the beginning.
            launch, size = backend.groups.launch, config.data.global_batch_size
            saved = backend.from_rank_0(lambda: saved_positions(config.output, self.resume, launch))
            objective.prepare(backend, samples.train, samples.drawn_units(config, objective, saved), size)
            # The validation set needs its scores, too: before the first step changes the model, which is the reference.
            if samples.held_out is not None:
                objective.prepare(backend, samples.held_out, range(objective.units(samples.held_out)), size)
        return objective

    def learner(
        self, run: Run[RunConfig], initial: LearningObjective, progress: dict[str, Any] | None, log: RunLog
    ) -> SupervisedLearner:
        return SupervisedLearner(self, initial, run, progress or {}, log)


def input_names(config: RunConfig, *, has_reference: bool) -> InputNames:
    """Return what a supervised run reads besides its samples.

    Args:
        has_reference: the loss compares with the model that training starts from.
    """
    names = InputNames.common(config)
    if has_reference:
        names.weights["model"] = config.model
    if config.distillation is not None and config.distillation.teacher is not None:
        names.weights["distillation.teacher"] = config.distillation.teacher
    if config.loss is not None and ":" in config.loss:
        names.code["loss"] = config.loss
    return names


class SupervisedLearner(Learner):
    """Learns from the samples of a run, in their order."""

    shared_errors = (EvaluationError,)
    totals: TrainCounts

    def __init__(
        self,
        data: SupervisedData,
        objective: LearningObjective,
        run: Run[RunConfig],
        progress: dict[str, Any],
        log: RunLog,
    ) -> None:
        """
        Args:
            objective: that of ``data``, with its models.
            progress: :meth:`state` of the checkpoint that the run resumes from; empty if it begins.
        """
        self._run, self._log = run, log
        self._samples, self._objective, self._answer_sampler = data.samples, objective, data.answer_sampler
        config, backend = run.config, run.backend
        self._last_step = backend.step_count
        self.totals = TrainCounts(**progress.get("counts", {}))
        self._stream = data.samples.batches(config, objective)
        run.stack.callback(self._stream.close)
        if "data" in progress:
            self._stream.load_state_dict(progress["data"])
            if changes := self._stream.changes:
                run.event_log.event("samples_changed", changes=changes)
                if run.main_rank:
                    logger.warning("data.on_changed: continue: %s", changes)
        self._stream_state = self._stream.progress.state
        self._validator: Validator | None = None
        if config.validation is not None:
            self._validator = Validator(
                *(config.validation, run, data.samples, objective, data.tokenizer, data.task_suite),
                *(self.totals, log),
            )
        saved_budget = progress.get("budget")
        self._budget = apply_budget(config, backend, data.samples, objective, run.adapter, saved_budget, run.event_log)
        backend.on_micro_batch = log.micro_batch
        if run.main_rank:
            self._print_start()
        self._step_start = time.perf_counter()

    def start(self) -> None:
        """Measure what a signal stopped in the process before, or the model before the first step."""
        number, validator = self._run.backend.step_count, self._validator
        settings = self._run.config.validation
        try:
            if validator is not None and self.totals.measurement_due:
                validator.measure_late(number)
            elif validator is not None and settings is not None and settings.at_start and number == 0:
                validator.measure_initial_model()
        except MeasurementStopped:
            self.stopped = True
        self._step_start = time.perf_counter()

    def next_batch(self, number: int) -> list[Sample] | None:
        if self.stopped:
            return None
        return self._samples.next_batch(self._stream, self._objective, self._run.backend)

    def step(self, number: int, batch: Sequence[Sample]) -> StepRecord:
        """Train on a batch, and validate where that is due."""
        run, objective, totals = self._run, self._objective, self.totals
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
        self.skipped_in_a_row = step.skipped_in_a_row
        self._stream_state = self._stream.progress.state
        totals.tokens += result.total_tokens
        totals.skipped += step.skipped
        totals.seconds += seconds
        totals.loss, self._last_step = result.loss, number
        validation_loss, metrics = self._validate(number)
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
            epoch=self._stream.progress.epochs,
            peak_memory_bytes=backend.platform.memory().peak,
            step_seconds=seconds,
            dispatch_seconds=dispatched,
            seconds=totals.seconds,
            mfu=model_flops_utilisation((result.total_tokens - result.shared_tokens) / seconds, batch, backend),
            shared_tokens=result.shared_tokens,
            validation_loss=validation_loss,
            metrics={**result.metrics, **metrics},
        )

    def _validate(self, number: int) -> tuple[float | None, dict[str, float]]:
        try:
            return (None, {}) if self._validator is None else self._validator.measure(number)
        except MeasurementStopped:
            self.stopped = self.totals.measurement_due = True
            return None, {}

    def after_step(self, number: int) -> None:
        """Show the tasks' metrics; sample answers to the run's prompts where that is due."""
        if self._validator is not None:
            self._validator.show_tasks(f"after step {number}")
        run, answer_sampler = self._run, self._answer_sampler
        last = number if self.finished else run.config.steps
        if answer_sampler is not None and answer_sampler.due(number, last):
            since = time.perf_counter()
            answers = answer_sampler.answer(run.backend, run.adapter)
            seconds = round(time.perf_counter() - since, 3)
            run.event_log.event("answered", step=number, seconds=seconds, answers=[vars(answer) for answer in answers])
            self._log.write_texts(number, {answer.prompt: answer.text for answer in answers})
        self._step_start = time.perf_counter()

    def save_batch(self, number: int, batch: Sequence[Sample]) -> Path | None:
        return save_batch(self._run.config, number, batch) if self._log.writes else None

    @property
    def finished(self) -> bool:
        validation = self._run.config.validation
        return validation is not None and 0 < validation.patience <= self.totals.stale

    @property
    def best_step(self) -> int | None:
        validation = self._run.config.validation
        return self.totals.best_step if validation is not None and validation.keep_best else None

    def state(self) -> dict[str, Any]:
        return {"data": self._stream_state, "counts": vars(self.totals), "budget": self._budget}

    def title(self) -> str:
        return f"{model_line(self._run.config, self._run.backend)}\n{self._description()}"

    def result(self) -> tuple[dict[str, Any], str]:
        config, progress = self._run.config, self._stream.progress
        passes = {
            str(source.path): round(epochs, 4)
            for source, epochs in zip(config.data.training_sources(), progress.source_epochs, strict=True)
        }
        values: dict[str, Any] = {"loss": self.totals.loss, "epochs": passes}
        line = end_line(config, self.totals, self._last_step)
        if isinstance(self._stream, PrefetchedBatches):
            values["bad_records"] = progress.bad_records
            # A stream's remarks are known at its end only; those of other data are printed at the start.
            line = "".join(f"data: {remark}\n" for remark in progress.remarks) + line
            if progress.bad_records:
                line += f"; {progress.bad_records} bad records were skipped (data.max_bad_records)"
        return values, line

    def _print_start(self) -> None:
        """Print the model, the data, remarks on the settings, and the verdict of the self-check."""
        config, backend = self._run.config, self._run.backend
        print(f"{model_line(config, backend)}: {self._description()}", flush=True)
        for line in (*self._samples.remarks, *self._samples.mixture(config, self._stream)):
            print(f"data: {line}", flush=True)
        for line in config.template_remarks():
            print(line, flush=True)
        for line in config.schedule_remarks():
            logger.warning(line)
        if backend.self_check is not None:
            print(backend.self_check.summary(), flush=True)

    def _description(self) -> str:
        """Return a one-line description of the data, the number of steps and the devices."""
        config, backend = self._run.config, self._run.backend
        ranks = f"{backend.world_size} rank{'s' if backend.world_size > 1 else ''} on {backend.platform.name}"
        lora = f"LoRA of rank {config.lora.rank}, " if config.lora is not None else ""
        units = f" {self._samples.train.unit}" if self._samples.train.members > 1 else ""
        steps = f"{config.steps} steps of {config.data.global_batch_size}{units}"
        precision = config.precision + (" with TF32 products" if config.tf32 else "")
        return f"{lora}{self._samples.describe()}, {steps}; {precision}; {ranks}"


def saved_positions(output: Path, resume: str | Path | None, launch: Launch) -> list[tuple[int, dict[str, Any]]]:
    """Return step and position in the data of each checkpoint that a run may resume from."""
    manifests = saved_manifests(output, resume, launch)
    return [(saved.step, saved.progress["data"]) for saved in manifests if "data" in saved.progress]


def model_flops_utilisation(tokens_per_s: float, batch: Sequence[Sample], backend: Backend) -> float | None:
    """Return model FLOP/s over the bf16 peak of all devices, or None where that is not known.

    Args:
        tokens_per_s: computed ones: those of a prefix that samples share count once.
    """
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
