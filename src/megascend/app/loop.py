"""Supervised training from a :class:`RunConfig`: what ``megascend train`` runs on every rank."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.app.checkpoint_policy import CheckpointPolicy
from megascend.app.disk_room import disk_warning
from megascend.app.event_log import EventLog
from megascend.app.profile import StepProfiler
from megascend.app.run import (
    ADAPTER,
    Beginning,
    begin,
    check_lora,
    check_packages,
    check_results,
    draw_metrics,
    export,
    keep_batch,
    load_tokenizer,
    make_trackers,
    model_line,
    tell_stop,
    too_many_skips,
    utilisation,
    with_template_date,
)
from megascend.app.run_log import RunLog, StepRecord
from megascend.app.start import Start
from megascend.app.start_checks import check_settings
from megascend.app.stop_signals import StopSignals
from megascend.config import RunConfig
from megascend.config.plugins import import_plugins
from megascend.errors import NonFiniteError

if TYPE_CHECKING:
    from megascend.app.generation import Answering
    from megascend.app.objectives import Objective
    from megascend.app.run_samples import RunSamples
    from megascend.backend import Backend
    from megascend.batch.results import ForwardBackwardResult, StepResult
    from megascend.batch.sample import Sample
    from megascend.data.order import Batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. The same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        loss: of the last step.
        tokens: input tokens over all ranks and steps.
        seconds: from the first step to the last, without start-up and export.
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


def train(config: RunConfig, *, overwrite: bool = False, resume: str | Path | None = None) -> TrainResult:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 writes to ``config.output``: metrics.jsonl and the TensorBoard log step by step; config.yaml, the exported
    model in hf/ (or, with ``lora``, in adapter/ what peft loads) and metrics.png each complete or not at all. A directory
    that holds an earlier run is refused before anything starts, unless ``overwrite``; then the earlier run's files stay as they
    are until this run has done its first step, and are removed then. Signals (:mod:`megascend.app.stop_signals`) end a run after
    its present step, with a checkpoint; output that cannot be written (:mod:`megascend.app.lasting_output`) ends none.

    Args:
        resume: ``"auto"``: resume from the newest checkpoint in ``config.output`` that is complete, if there is any. A path: from
            that checkpoint, or the newest of that run.

    Raises:
        ConfigError: the output directory holds a run, or a setting cannot work, ``lora.targets`` or ``trackers`` for example.
        MissingDependencyError: ``plot`` is set, or a tracker is named, and its package is not installed.
        DataError: the data cannot be trained on; the message names file and line.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
        CheckpointError: there is no checkpoint to resume from, each is damaged, or one could not be written.
    """
    start = Start(config, overwrite, resume)
    try:
        with start.event_log.keeping_errors(lambda: 0):
            import_plugins(config.plugins)
            check_packages(config)
            check_settings(config, config.data_paths(), overwrite)
            check_lora(config)
            return run(config, start, overwrite, resume)
    finally:
        start.close()


def run(config: RunConfig, start: Start, overwrite: bool, resume: str | Path | None) -> TrainResult:
    """:func:`train`, after what could be refused at once."""
    launch, event_log = start.launch, start.event_log
    runtime = start.process(config)

    # Data that cannot be trained on are found before the model is built.
    from megascend.app.generation import Answering
    from megascend.app.objectives import make_objective
    from megascend.app.run_samples import RunSamples
    from megascend.app.sample_limits import layout_of_run, sample_limits
    from megascend.app.token_budget import TokenBudget, check_platform, with_first_budget
    from megascend.data.prepare import set_template

    check_platform(config, runtime.platform)
    tokenizer, limits = load_tokenizer(config.model), sample_limits(config, launch.world_size)
    chat_template = set_template(config.data, tokenizer)
    config = with_template_date(config, tokenizer, resume, launch)
    samples = RunSamples.prepare(config, tokenizer, limits)
    answering = None
    if config.generation is not None:
        answering = Answering.prepare(
            config.generation, config.data, tokenizer, limits, config.model, config.template_date
        )
    objective = make_objective(config, samples.learned)
    config = config.of_length(objective.units(samples.learned))
    if launch.rank == 0 and (said := disk_warning(config)):
        logger.warning(said)

    # Model: trained itself, or frozen under one adapter
    start.engine(config, runtime)
    backend = start.backend(with_first_budget(config, samples, layout_of_run(config, launch.world_size)))
    lora = config.lora
    adapter = None if lora is None else ADAPTER
    launched = launch.agent_store or launch.world_size > 1
    with backend, event_log.keeping_errors(lambda: backend.step_count + 1), StopSignals(launched=launched) as signals:
        if lora is not None:
            backend.add_adapter(ADAPTER, lora)
        backend.groups.monitor.last_words = lambda error: event_log.error(error, backend.step_count + 1)
        backend.chat_template = chat_template
        samples.check_alike(backend)
        check_results(config, backend, overwrite)
        samples.check_lengths(backend)
        stream = samples.batches(config, objective)
        size = config.data.global_batch_size
        objective.prepare(backend, samples.learned, samples.drawn(config, objective), size)
        if samples.held_out is not None:
            objective.prepare(backend, samples.held_out, range(objective.units(samples.held_out)), size)
        counts, budget = Counts(), TokenBudget(config)
        beginning = begin(config, backend, event_log, overwrite, resume, ("data", "counts"))
        if progress := beginning.progress:
            stream.load_state_dict(progress["data"])
            if stream.changes:
                event_log.event("samples_changed", changes=stream.changes)
                if backend.rank == 0:
                    logger.warning("data.on_changed: continue: %s", stream.changes)
            counts = Counts(**progress["counts"])
        budget.settle(config, backend, samples, adapter, (progress or {}).get("budget"), event_log)
        if backend.rank == 0:
            tell_start(config, backend, samples)
            start.ready()

        # Loop
        number = done = backend.step_count
        saves = CheckpointPolicy(
            backend,
            config,
            event_log,
            lambda: {"data": stream.state_dict(), "counts": vars(counts), "budget": budget.state_dict()},
            beginning.take_over,
            lambda: not beginning.waiting,
        )
        trackers = make_trackers(config, event_log, done)
        backend.platform.reset_peak_memory()
        with RunLog(
            config.output,
            config.steps,
            trackers,
            enabled=backend.rank == 0,
            done=done,
            waiting=lambda: beginning.waiting,
        ) as log:
            backend.on_micro_batch = log.micro_batch
            steps = Steps(config, backend, samples, objective, stream, counts, log, adapter, answering, beginning)
            numbers = range(done + 1, config.steps + 1)
            profiler = StepProfiler(config.profile, config.output, backend.platform, backend.rank, numbers)
            for number in numbers:
                with profiler.step(number):
                    steps.take(number)
                if number == done + 1:
                    start.first_step()
                if saves.after_step(number, signals.received is not None):
                    break
            profiler.finish()
            if number == config.steps:
                beginning.take_over()
        saves.finish(number)

        # Out
        stopped = exported = None
        if number < config.steps:
            stopped = signals.received.name if signals.received is not None else "a signal on another rank"
            tell_stop(beginning, number, stopped, saves.problem)
        else:
            exported = leave_results(config, backend, samples, log, event_log, counts, saves)
    return TrainResult(
        number, counts.loss, counts.tokens, counts.seconds, counts.skipped, config.output, exported, stopped,
        counts.validation_loss,
    )  # fmt: skip


def tell_start(config: RunConfig, backend: Backend, samples: RunSamples) -> None:
    """Say what is trained, on what, and what the self-check found."""
    print(f"{model_line(config, backend)}: {what_is_trained(config, backend, samples)}", flush=True)
    for line in samples.remarks:
        print(f"data: {line}", flush=True)
    for line in config.template_remarks():
        print(line, flush=True)
    for line in config.schedule_remarks():
        logger.warning(line)
    if backend.self_check is not None:
        print(backend.self_check.summary(), flush=True)


def leave_results(
    config: RunConfig,
    backend: Backend,
    samples: RunSamples,
    log: RunLog,
    event_log: EventLog,
    counts: Counts,
    saves: CheckpointPolicy,
) -> Path | None:
    """After the last step: export and plot where the run asks for them, and say where to look. Collective.

    Returns:
        Directory of the export, or None.
    """
    exported = export(config, backend, saves, config.steps) if config.export else None
    if backend.rank == 0 and config.plot:
        title = f"{model_line(config, backend)}\n{what_is_trained(config, backend, samples)}"
        draw_metrics(config, log, title)
    event_log.event("finished", step=config.steps, loss=counts.loss)
    if backend.rank == 0:
        print(end_line(config, counts), flush=True)
    return exported


def end_line(config: RunConfig, counts: Counts) -> str:
    """One line on what has happened."""
    skipped = f", {counts.skipped} of them skipped (non-finite gradients)" if counts.skipped else ""
    validated = f", validation loss {counts.validation_loss:.4f}" if counts.validation_loss is not None else ""
    length = f"{config.steps} step{'s' if config.steps != 1 else ''} in {counts.seconds:.0f} s"
    return f"{length}{skipped}, last loss {counts.loss:.4f}{validated}; see {config.output}"


@dataclass
class Steps:
    """The steps of a run, one after the other."""

    config: RunConfig
    backend: Backend
    samples: RunSamples
    objective: Objective
    stream: Batches[int]
    counts: Counts
    log: RunLog
    adapter: str | None
    answering: Answering | None
    beginning: Beginning
    _since: float = field(default_factory=time.perf_counter)

    def take(self, number: int) -> None:
        """Train on the next batch, measure the validation loss where it is due, and log the step. Collective.

        Raises:
            NonFiniteError: more steps in a row than the run allows were skipped.
        """
        config, backend, objective, held_out = self.config, self.backend, self.objective, self.samples.held_out
        batch = objective.batch(self.samples.learned, next(self.stream))
        result = backend.forward_backward(backend.shard(batch), loss=objective.loss, adapter=self.adapter)
        dispatched = time.perf_counter() - self._since
        step = backend.optimizer_step()
        seconds = time.perf_counter() - self._since
        self.counts.add(result, step, seconds)
        measured = None
        if held_out is not None and (number % config.validation_every == 0 or number == config.steps):
            measured = objective.measure(backend, held_out, self.adapter, config.data.global_batch_size)
            self.counts.validation_loss = measured
        epochs = self.stream.epochs
        if not step.skipped:
            self.beginning.take_over()
        self.log.write(record(number, result, step, seconds, dispatched, self.counts, epochs, batch, backend, measured))
        if step.skipped_in_a_row > config.max_skipped_steps:
            keeps = backend.rank == 0 and not self.beginning.waiting
            where = keep_batch(config, number, batch) if keeps else None
            raise NonFiniteError(too_many_skips(config, number, step.skipped_in_a_row, where))
        if self.answering is not None and self.answering.due(number, config.steps):
            self.answer(self.answering, number)
        self._since = time.perf_counter()

    def answer(self, answering: Answering, number: int) -> None:
        """Have the model answer the run's prompts after step ``number``, and say what it did. Collective."""
        since = time.perf_counter()
        answers = answering.answer(self.backend, self.adapter)
        took = round(time.perf_counter() - since, 3)
        self.beginning.event_log.event(
            "answered", step=number, seconds=took, answers=[vars(answer) for answer in answers]
        )
        self.log.write_texts(number, {answer.prompt: answer.text for answer in answers})


@dataclass
class Counts:
    """Sums over the steps of a run, those before it was resumed included.

    Attributes:
        tokens: input tokens of all ranks.
        skipped: steps that all ranks skipped.
        seconds: in steps, on this rank.
        loss: of the last step.
        validation_loss: the last one that was measured.
    """

    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    validation_loss: float | None = None

    def add(self, result: ForwardBackwardResult, step: StepResult, seconds: float) -> None:
        """Count one step."""
        self.tokens += result.total_tokens
        self.skipped += step.skipped
        self.seconds += seconds
        self.loss = result.loss


def record(
    number: int,
    result: ForwardBackwardResult,
    step: StepResult,
    seconds: float,
    dispatched: float,
    counts: Counts,
    epoch: float,
    batch: Sequence[Sample],
    backend: Backend,
    validation_loss: float | None,
) -> StepRecord:
    """The line of metrics.jsonl about a step that took ``seconds``, ``dispatched`` of them to hand out its work."""
    speed = result.total_tokens / seconds
    return StepRecord(
        step=number,
        loss=result.loss,
        grad_norm=step.grad_norm,
        lr=step.lr,
        tokens=result.tokens,
        total_tokens=result.total_tokens,
        tokens_per_s=speed,
        skipped=step.skipped,
        epoch=epoch,
        peak_memory_bytes=backend.platform.memory().peak,
        step_seconds=seconds,
        dispatch_seconds=dispatched,
        seconds=counts.seconds,
        mfu=utilisation(speed, batch, backend),
        validation_loss=validation_loss,
        metrics=result.metrics,
    )


def what_is_trained(config: RunConfig, backend: Backend, samples: RunSamples) -> str:
    """What, for how long, and on what, in a line."""
    ranks = f"{backend.world_size} rank{'s' if backend.world_size > 1 else ''} on {backend.platform.name}"
    lora = f"LoRA of rank {config.lora.rank}, " if config.lora is not None else ""
    steps = f"{config.steps} steps of {config.data.global_batch_size}{' pairs' if config.dpo is not None else ''}"
    precision = config.precision + (" with TF32 products" if config.tf32 else "")
    return f"{lora}{samples.describe()}, {steps}; {precision}; {ranks}"
