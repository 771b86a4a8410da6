"""A run of any kind on one rank: world, data, model, loop, results. What kinds of runs differ in is in a :class:`Training`."""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import psutil

from megascend.app.ahead import SelfCheckPrefetch, compiling_kernels
from megascend.app.checkpoint_policy import CheckpointPolicy
from megascend.app.event_log import EventLog
from megascend.app.plot import PANELS, Panel, plot_metrics
from megascend.app.preflight import AnyConfig, RunPlan, check_run, disk_warning
from megascend.app.profile import StepProfiler
from megascend.app.push import push
from megascend.app.resume import begin, check_start, may_write
from megascend.app.run_inputs import KEY as INPUTS
from megascend.app.run_inputs import RunInputs
from megascend.app.run_log import RunLog
from megascend.app.stop_signals import StopSignals
from megascend.bootstrap.engines import needs
from megascend.config import Adapters, Checkpoint, TrainerConfig
from megascend.config.plugins import import_plugins
from megascend.distributed.launch import Launch
from megascend.errors import CheckpointError, NonFiniteError
from megascend.huggingface import hub
from megascend.huggingface.files import copy_tokenizer, read_config
from megascend.io.lasting_output import LastingOutput
from megascend.io.paths import is_kept, unwritable_reason
from megascend.tracking.trackers import Trackers

if TYPE_CHECKING:
    from megascend.app.run_directory import OutputDirectory
    from megascend.app.run_log import MetricsRecord
    from megascend.backend import Backend
    from megascend.bootstrap import Runtime

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""Name of a run's adapter, the same as peft gives to one that it loads."""


@dataclass(frozen=True)
class World(Generic[AnyConfig]):
    """Context of a run before its model is built.

    Attributes:
        plan: result of the preflight checks.
        resume: ``auto``, the path of a checkpoint, or None.
    """

    plan: RunPlan[AnyConfig]
    launch: Launch
    runtime: Runtime
    resume: str | Path | None


@dataclass(frozen=True)
class Run(Generic[AnyConfig]):
    """A run whose model is built.

    Attributes:
        config: the settings as :meth:`Training.prepare` completed them.
        adapter: name of the adapter that is trained; None: the model itself.
        stack: closes what callbacks open, before the backend.
    """

    config: AnyConfig
    backend: Backend
    event_log: EventLog
    adapter: str | None
    stack: ExitStack

    @property
    def main_rank(self) -> bool:
        """True on the rank that writes and prints."""
        return self.backend.rank == 0


class Training(ABC, Generic[AnyConfig]):
    """One kind of run. :func:`run` calls these methods in the order below, on every rank.

    Attributes:
        progress_keys: keys of the dict that :meth:`progress` returns; a checkpoint without them is from another kind of run.
        shared_errors: errors that a step raises on every rank, so that all of them can save the last step.
        panels: panels of the run's plot.
        chat_template: template to export in place of the model's; None: the model's.
    """

    progress_keys: ClassVar[tuple[str, ...]]
    shared_errors: ClassVar[tuple[type[Exception], ...]] = ()
    panels: ClassVar[Sequence[Panel]] = PANELS
    chat_template: str | None = None

    def check(self, config: AnyConfig, launch: Launch) -> None:
        """Check settings that :func:`check_run` does not know. Called before torch is imported."""

    def start(self, plan: RunPlan[AnyConfig], launch: Launch, stack: ExitStack) -> None:
        """Start other processes that need long, before this one uses a device. The stack ends them with the run."""

    @abstractmethod
    def prepare(self, world: World[AnyConfig]) -> AnyConfig:
        """Read the data, check everything that can be checked without the model, and return the completed settings. Local."""

    def model_config(self, config: AnyConfig) -> AnyConfig:
        """Return the settings with which the model is built."""
        return config

    def after_build(self, run: Run[AnyConfig]) -> None:
        """Run checks and computations that need the model, before a checkpoint is loaded into it. Collective."""

    @abstractmethod
    def begin(self, run: Run[AnyConfig], progress: dict[str, Any] | None) -> None:
        """Resume from ``progress`` of a checkpoint, or begin; print what is about to happen. Collective."""

    @abstractmethod
    def start_loop(self, log: RunLog) -> None:
        """Prepare for the loop, whose records go to ``log``. Collective."""

    @abstractmethod
    def next_batch(self, number: int, stop: Callable[[], bool]) -> Any | None:
        """Return the batch of step ``number``; None if a signal stops any rank while they wait for it. Collective."""

    @abstractmethod
    def step(self, number: int, batch: Any) -> MetricsRecord:
        """Train on a batch. Collective."""

    def after_step(self, number: int) -> None:
        """Run checks and evaluations that are due after a logged step. Collective."""

    @property
    def finished(self) -> bool:
        """True if the run ends after this step, whatever ``steps`` is. The same on every rank."""
        return False

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint is to be kept and exported; None: no checkpoint is better than others."""
        return None

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """Return the state to save beside the model, as of the last optimizer step, even if a later batch has been taken."""

    def weights(self, config: AnyConfig) -> dict[str, Path]:
        """Return the checkpoint directories that a resumed run reads again, by setting: they must be as they were."""
        return {} if config.lora is None else {"model": config.model}

    def code(self, config: AnyConfig) -> dict[str, str]:
        """Return the names of functions and modules that decide what is learned, by setting."""
        return {f"plugins: {name}": name for name in config.plugins}

    def packages(self, config: AnyConfig) -> dict[str, str]:
        """Return the names of installed packages that decide what is learned, by setting."""
        return {}

    @abstractmethod
    def title(self, run: Run[AnyConfig]) -> str:
        """Return the title of the plot."""

    @abstractmethod
    def result(self) -> tuple[dict[str, Any], str]:
        """Return the values of the event ``finished``, and the summary line to print."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run, the same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        export: directory of the exported model, or of the adapter if one was trained, or None.
        stopped: the signal that stopped the run before its last step (``"SIGTERM"``), or None. A checkpoint was saved.
    """

    steps: int
    export: Path | None
    stopped: str | None


def run(
    training: Training[AnyConfig],
    config: AnyConfig,
    overwrite: bool,
    resume: str | Path | None,
    plan: RunPlan[AnyConfig] | None = None,
) -> RunResult:
    """Run ``training`` as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Args:
        plan: result of :func:`megascend.app.preflight.preflight` for ``config``; None: it was not called on this host.

    Raises:
        MegascendError: a setting, data, a step, an export or a checkpoint that failed.
    """
    phases = StartPhases()
    launch = Launch.from_environment()
    if plan is None:
        check_start(config.output, overwrite, resume, launch)
    with ExitStack() as stack:
        # World
        # Before anything is printed: a closed pipe must not end the run.
        output = LastingOutput()
        output.install()
        stack.callback(output.restore)
        # Until this run owns the directory, it must not write to an earlier run's event log.
        active = may_write(config.output, resume, launch)
        event_log = EventLog(config.output, launch, active=active, losses=output.losses)
        stack.enter_context(event_log.recording_errors(lambda: 0))
        plan = plan_with_plugins(training, config, launch, launch.world_size, overwrite, plan)
        self_check = SelfCheckPrefetch(plan, launch.rank)
        stack.callback(self_check.close)
        # A stack of its own, which the first step closes early; an error before that closes it with the run.
        kernel_compilation = stack.enter_context(ExitStack())
        kernel_compilation.enter_context(compiling_kernels(plan, launch))
        training.start(plan, launch, stack)
        phases.end("settings")
        # Before torch and Megatron are used: providers patch them while they are imported.
        runtime = bootstrap(config)
        runtime.platform.warm_up(launch.local_rank)
        phases.end("torch")
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401  for data and the self-check: a phase of its own

        phases.end("transformers")

        # Data: before the model is built, which may take minutes
        config = training.prepare(World(plan, launch, runtime, resume))
        if launch.rank == 0 and (warning := disk_warning(config, plan.info)):
            logger.warning(warning)
        phases.end("data")

        # Model
        megatron = needs(config.engine).megatron
        if megatron:
            self_check.begin()  # the verdict is needed when the model is built
            runtime.load_megatron()
        # Imported modules live as long as the process: without them, a garbage collection between steps takes far less time.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)  # the caller's own objects are among them
        phases.end("Megatron" if megatron else "engine")
        this_run = build_model(training, config, event_log, stack, phases)
        # After the model is built: until then a signal may simply end the process, as there is nothing to save.
        signals = stack.enter_context(StopSignals(launched=launch.agent_store or launch.world_size > 1))
        # Before the first step: an export that fails after the last one would cost the run.
        check_results(config, this_run.backend, overwrite)
        training.after_build(this_run)
        directory, progress = begin(config, this_run.backend, event_log, overwrite, resume, training.progress_keys)
        inputs = RunInputs(this_run.backend, training.weights(config), training.code(config), training.packages(config))
        inputs.compare(None if progress is None else progress.get(INPUTS))
        training.begin(this_run, progress)
        phases.end("preparing")
        if this_run.main_rank:
            print(f"ready after {phases}", flush=True)

        saves, rows, step = train_steps(training, this_run, directory, inputs, signals, phases, kernel_compilation)
        if step < config.steps and not training.finished:
            stopped = signals.received.name if signals.received is not None else "a signal on another rank"
            report_stop(directory, step, stopped, saves.problem)
            return RunResult(step, None, stopped)
        exported = write_results(training, this_run, saves, rows, step)
    # The ranks have parted: others need not wait, within a collective's deadline, for an upload by rank 0.
    if config.push is not None and exported is not None and launch.rank == 0:
        with event_log.recording_errors(lambda: step):
            print(f"uploading {exported} to {config.push.repository}", flush=True)
            address = push(exported, config.push)
        event_log.event("pushed", address=address)
        print(f"uploaded: {address}", flush=True)
    return RunResult(step, exported, None)


def plan_with_plugins(
    training: Training[AnyConfig],
    config: AnyConfig,
    launch: Launch,
    world_size: int,
    overwrite: bool,
    plan: RunPlan[AnyConfig] | None,
) -> RunPlan[AnyConfig]:
    """Import the run's plug-ins, which may register its engine, trackers and architecture, and check it with them.

    Args:
        plan: result of the checks without plug-ins, which holds for a run that has none; None: they have not been made.
    """
    import_plugins(config.plugins)
    if plan is None or config.plugins:
        plan = check_run(config, world_size, overwrite, plugins_pending=False)
        training.check(config, launch)
    return plan


def build_model(
    training: Training[AnyConfig], config: AnyConfig, event_log: EventLog, stack: ExitStack, phases: StartPhases
) -> Run[AnyConfig]:
    """Build the model, which is trained itself or frozen under one adapter. Collective.

    Args:
        stack: closes the model.
    """
    backend = stack.enter_context(make_backend(training.model_config(config)))
    phases.end("model")
    if backend.self_check is not None:
        phases.split_off("self-check", "model", backend.self_check_s)
    stack.enter_context(event_log.recording_errors(lambda: backend.step_count + 1))
    adapter = None if config.lora is None else ADAPTER
    if adapter is not None:
        backend.add_adapter(adapter, config.lora)
    # The watchdog ends a process that is blocked in a collective and cannot raise: the error file is its only trace.
    backend.groups.monitor.on_fatal = lambda error: event_log.error(error, backend.step_count + 1)
    backend.chat_template = training.chat_template
    return Run(config, backend, event_log, adapter, stack.enter_context(ExitStack()))


def train_steps(
    training: Training[AnyConfig],
    run: Run[AnyConfig],
    directory: OutputDirectory,
    inputs: RunInputs,
    signals: StopSignals,
    phases: StartPhases,
    kernel_compilation: ExitStack,
) -> tuple[CheckpointPolicy, list[dict[str, Any]], int]:
    """Train up to the last step, or to a signal; return the checkpoints' policy, the rows of the log, and the last step.

    Args:
        inputs: saved with each checkpoint.
        kernel_compilation: closed after the first step, which has compiled what it needed; a compiler beside it would only take
            the processor.
    """
    config, backend = run.config, run.backend
    number = steps_done = backend.step_count
    saves = checkpoint_policy(training, run, directory, inputs)
    # The peak while loading is not the peak of training.
    backend.platform.reset_peak_memory()
    with run_log(run, directory) as log:
        steps = range(steps_done + 1, config.steps + 1)
        profiler = StepProfiler(config.profile, config.output, backend.platform, backend.rank, steps)
        training.start_loop(log)
        in_step = False
        try:
            for number in steps:
                if training.finished:  # resumed at its end
                    number -= 1
                    break
                batch = training.next_batch(number, lambda: signals.received is not None)
                if batch is None:
                    # The batch of this step never came: the checkpoint is that of the step before.
                    number -= 1
                    saves.after_step(number, True)
                    break
                with profiler.step(number):
                    # While this is set, other ranks may be in a collective of this step.
                    in_step = True
                    record = training.step(number, batch)
                    in_step = False
                    # The earlier run's files go when this one has done a step; a skipped one has changed no weights.
                    if not record.skipped:
                        directory.take_over()
                    log.write(record)
                    # After the row is written: an evaluation that fails must not cost the step's figures.
                    training.after_step(number)
                if number == steps_done + 1:
                    phases.end("first step")
                    kernel_compilation.close()
                    run.event_log.event("first_step", **phases.record())
                if saves.after_step(number, signals.received is not None) or training.finished:
                    break
        except Exception as error:
            # Neither an incomplete step is saved, nor one that other ranks may still be in.
            complete = not in_step or backend.step_count == number
            if complete and backend.step_count > steps_done and can_save_after(error, training, backend):
                saves.save_last(backend.step_count)
            raise
        profiler.finish()
        # A run that was resumed at its end has no step to take the directory over with.
        if number == config.steps or training.finished:
            directory.take_over()
    saves.finish(number)
    return saves, log.rows, number


def checkpoint_policy(
    training: Training[AnyConfig], run: Run[AnyConfig], directory: OutputDirectory, inputs: RunInputs
) -> CheckpointPolicy:
    """Build the policy of a run's checkpoints, which save the training's progress and the run's inputs beside the model."""

    def progress() -> dict[str, Any]:
        return training.progress() | {INPUTS: inputs.state_dict()}

    return CheckpointPolicy(
        run.backend,
        run.config,
        run.event_log,
        progress,
        directory.take_over,
        lambda: not directory.waiting,
        lambda: training.best_step,
    )


def run_log(run: Run[AnyConfig], directory: OutputDirectory) -> RunLog:
    """Build the log of a run's steps, which also feeds its trackers."""
    config, steps_done = run.config, run.backend.step_count
    trackers = Trackers(
        config.tracker_options,
        config.output,
        config.model_dump(mode="json"),
        steps_done,
        lambda name, problem: run.event_log.event("tracker_failed", tracker=name, problem=problem),
    )
    return RunLog(
        config.output,
        config.steps,
        trackers,
        enabled=run.main_rank,
        steps_done=steps_done,
        waiting=lambda: directory.waiting,
    )


def can_save_after(error: Exception, training: Training[AnyConfig], backend: Backend) -> bool:
    """Check whether all ranks can save a checkpoint after ``error``, which neither a checkpoint nor the weights caused."""
    # A checkpoint is a collective, and after an error of this rank alone the others are in another one.
    shared = isinstance(error, training.shared_errors) or getattr(error, "on_all_ranks", False)
    everywhere = backend.world_size == 1 or shared
    return everywhere and not isinstance(error, (CheckpointError, NonFiniteError))


# --- the model ---


def bootstrap(config: TrainerConfig) -> Runtime:
    """Make this process ready for a run's engine, as :func:`megascend.bootstrap`."""
    import megascend

    return megascend.bootstrap(
        config.platform,
        config.parallel,
        config.tf32,
        config.engine,
        config.precision,
        config.provider,
        config.affinity,
    )


def make_backend(config: TrainerConfig) -> Backend:
    """Build the backend that a run's settings describe; with ``lora``, one that has room for its adapter."""
    from megascend import backends

    return backends.make_backend(config.engine, model=config.model, **backend_settings(config))


def backend_settings(config: TrainerConfig) -> dict[str, Any]:
    """Select the settings of a run with which its engine's backend is constructed."""
    from megascend import backends

    lora = config.lora
    common_fields = (
        "precision", "tf32", "optimizer", "schedule", "recompute", "moe", "mtp", "mtp_loss_weight", "vision_tower", "batching",
        "platform", "seed", "timeout_s",
    )  # fmt: skip
    engine_fields = ("parallel", "fsdp", "provider", "provider_options", "self_check")
    settings = {name: getattr(config, name) for name in (*common_fields, *engine_fields)}
    settings["adapters"] = None
    if lora is not None:
        settings["adapters"] = Adapters(
            max_count=1, max_rank=lora.rank, targets=lora.targets, base_weights=config.base_weights
        )
    settings["save_timeout_s"] = config.checkpoint.timeout_s
    settings["head"] = config.head
    # A setting that the engine does not have is left out while it has its default. Otherwise the engine refuses it by name.
    defaults = {name: field.default for name, field in TrainerConfig.model_fields.items()}
    # The run file has these under other names, or not at all.
    defaults |= {"adapters": None, "save_timeout_s": Checkpoint().timeout_s, "head": "lm"}
    accepted = backends.accepted_settings(config.engine)
    return {name: value for name, value in settings.items() if name in accepted or value != defaults[name]}


def model_line(config: TrainerConfig, backend: Backend) -> str:
    """Name the model that a run trains: its architecture, its size, and where it is from."""
    count = backend.parameter_count
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    return f"{read_config(config.model).get('model_type', 'a model')} with {size} parameters ({config.model})"


def too_many_skips(config: TrainerConfig, step: int, in_a_row: int, batch: Path | None) -> NonFiniteError:
    """Make the error that ends a run whose gradients stay non-finite.

    Args:
        in_a_row: number of consecutive skipped steps.
        batch: file with the samples of the last one; None: they were not written.
    """
    remedy = "lower optimizer.lr" if config.precision == "fp32" else "lower optimizer.lr, or use a wider precision"
    return NonFiniteError(
        f"{in_a_row} steps in a row, up to step {step}, had non-finite gradients and were skipped on all ranks; the "
        f"limit is max_skipped_steps: {config.max_skipped_steps}. Look at the data"
        f"{f' (the last batch is in {batch})' if batch is not None else ''}, {remedy}"
    )


# --- results ---


def check_results(config: TrainerConfig, backend: Backend, overwrite: bool) -> None:
    """Check before the first step that what is trained can be written after the last one. Collective.

    Args:
        overwrite: an earlier run's results will be removed.
    """
    if config.lora is None and (config.export or config.checkpoint.hf):
        backend.check_export(config.output / "hf", replaces=overwrite)
    elif config.lora is not None and config.export:
        backend.from_rank_0(lambda: check_adapter_path(config.output / "adapter", overwrite))
    settings = config.push
    if settings is not None:

        def create() -> None:
            hub.check_access(settings.repository)
            hub.create_repository(settings.repository, private=settings.private)

        backend.from_rank_0(create)


def check_adapter_path(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError if a run's adapter cannot be written to ``path``."""
    from megascend.lora.adapter_io import check_target

    removed = overwrite and not is_kept(path)
    if not removed:
        check_target(path)
    if problem := unwritable_reason(path.parent if removed else path):
        raise CheckpointError(f"save_adapter: {path} cannot be written: {problem}")


def write_results(
    training: Training[AnyConfig],
    run: Run[AnyConfig],
    saves: CheckpointPolicy,
    rows: Sequence[dict[str, Any]],
    step: int,
) -> Path | None:
    """Export what was trained, plot the run and report its end; return the export's directory, if there is one. Collective."""
    config = run.config
    # First: what was trained must not depend on a plot.
    exported = None
    if config.export:
        best = load_best(training, run, saves, step)
        exported = export(run, saves, step, best)
    if run.main_rank and config.plot:
        path = config.output / "metrics.png"
        try:
            plot_metrics(rows, path, training.title(run), training.panels)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
    values, line = training.result()
    # The best step is loaded again for its export.
    exported_step = {} if exported is None else {"exported_step": run.backend.step_count}
    run.event_log.event("finished", step=step, **exported_step, **values)
    if run.main_rank:
        print(line, flush=True)
    return exported


def load_best(training: Training[AnyConfig], run: Run[AnyConfig], saves: CheckpointPolicy, step: int) -> Path | None:
    """Load the best checkpoint if the last step is not the best one, and return where it is. Collective."""
    if training.best_step in (None, step):
        return None
    path = saves.best_path()
    if path is None:
        if run.main_rank:
            logger.warning(
                "the checkpoint of step %d, the best one, was not written: exporting step %d", training.best_step, step
            )
        return None
    run.backend.load(path)
    if run.main_rank:
        print(f"exporting step {training.best_step}, the best one", flush=True)
    return path


def export(run: Run, saves: CheckpointPolicy, step: int, best: Path | None = None) -> Path:
    """Write what was trained, the model or the adapter alone, and return where. Collective.

    Args:
        best: the checkpoint that has been loaded in place of the last step.
    """
    config, backend = run.config, run.backend
    path = config.output / ("hf" if run.adapter is None else "adapter")
    try:
        if run.adapter is None:
            backend.export_hf(path)
        else:
            backend.save_adapter(run.adapter, path, optimizer=False)
            backend.from_rank_0(lambda: copy_tokenizer(config.model, path, backend.chat_template))
    except CheckpointError as error:
        # The model is not that of the last step any more: keep() would save it as such.
        remedy = saves.keep(step) if best is None else f"{best} keeps what was to be exported"
        raise CheckpointError(f"{error}; {remedy}") from error
    return path


def report_stop(directory: OutputDirectory, step: int, signal: str, problem: str | None) -> None:
    """Report that a signal has stopped the run after ``step``.

    Args:
        problem: why there is no checkpoint of that step.
    """
    main_rank = directory.backend.rank == 0
    if directory.waiting:
        if main_rank:
            print(
                f"stopped by {signal} before a step was done; the earlier run in {directory.config.output} is as it was",
                flush=True,
            )
        return
    if problem is not None:
        raise CheckpointError(f"stopped by {signal} after step {step}, without a checkpoint: {problem}")
    directory.event_log.event("stopped", step=step, signal=signal)
    if main_rank:
        print(f"stopped by {signal} after step {step}; resume with --resume auto", flush=True)


# --- the time until the first step ---


class StartPhases:
    """The phases between the start of this process and the first step, one after the other.

    Attributes:
        seconds: duration of each completed phase, by a monotonic clock.
        processor_s: user and system time of this process's threads in it; what is missing to ``seconds`` was waited for.
    """

    def __init__(self) -> None:
        """Begin with the start of the process: phase ``Python`` ends here."""
        self.seconds: dict[str, float] = {}
        self.processor_s: dict[str, float] = {}
        # Two clocks: that of the system knows when the process began, and may be set while it runs.
        self._since = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._since_processor = 0.0
        self.end("Python")

    def end(self, name: str) -> None:
        """End the phase that has lasted since the one before."""
        now, processor = time.monotonic(), time.process_time()
        self.seconds[name] = now - self._since
        self.processor_s[name] = processor - self._since_processor
        self._since, self._since_processor = now, processor

    def split_off(self, name: str, part_of: str, seconds: float) -> None:
        """Make ``seconds`` of phase ``part_of``, spent waiting, a phase of their own."""
        self.seconds[part_of] -= seconds
        self.seconds[name] = seconds
        self.processor_s[name] = 0.0

    def record(self) -> dict[str, dict[str, float]]:
        """Return the phases for a log."""
        names = {"seconds": self.seconds, "processor_s": self.processor_s}
        return {name: {phase: round(value, 3) for phase, value in values.items()} for name, values in names.items()}

    def __str__(self) -> str:
        """Return ``14.2 s: Python 0.3, torch 3.2, ...``; phases of less than 0.1 s are left out."""
        parts = [f"{name} {value:.1f}" for name, value in self.seconds.items() if value >= 0.05]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
