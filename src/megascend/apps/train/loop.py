"""A run of any kind on one rank: process, data, model, loop, results. What differs between kinds is in a :class:`Training`."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megascend.apps.tracking.trackers import Trackers
from megascend.apps.train.checkpoint_policy import CheckpointPolicy
from megascend.apps.train.event_log import EventLog
from megascend.apps.train.learner import Run, RunContext, RunResult, Training
from megascend.apps.train.plot import plot_metrics
from megascend.apps.train.prefetch import SelfCheckPrefetch, compiling_kernels
from megascend.apps.train.preflight import AnyConfig, RunPlan, check_run, disk_warning
from megascend.apps.train.profile import StepProfiler
from megascend.apps.train.push import push
from megascend.apps.train.resume import begin, check_start, may_write
from megascend.apps.train.run_backend import ADAPTER, bootstrap, make_backend
from megascend.apps.train.run_directory import lock_output
from megascend.apps.train.run_inputs import INPUTS, RunInputs
from megascend.apps.train.run_log import RunLog
from megascend.config import TrainerConfig
from megascend.config.plugins import import_plugins
from megascend.errors import CheckpointError, MissingDependencyError, NonFiniteError, redacted
from megascend.models.checkpoint_files import hub
from megascend.models.checkpoint_files.files import GENERATION_CONFIG, copy_tokenizer, write_ends
from megascend.runtime.bootstrap.engines import needs
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.lasting_output import LastingOutput
from megascend.runtime.io.paths import is_kept, unwritable_reason
from megascend.runtime.stop_signals import StopSignals
from megascend.surroundings import announce

if TYPE_CHECKING:
    from megascend.apps.train.run_directory import OutputDirectory
    from megascend.backend import Backend

logger = logging.getLogger(__name__)


def run(
    training: Training[AnyConfig],
    config: AnyConfig,
    overwrite: bool,
    resume: str | Path | None,
    plan: RunPlan[AnyConfig] | None = None,
) -> RunResult:
    """Run ``training`` as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Args:
        plan: result of :func:`megascend.apps.train.preflight.preflight` for ``config``; None: it was not called on this host.

    Raises:
        MegascendError: a setting, data, a step, an export or a checkpoint that failed.
    """
    phases = StartPhases()
    launch = Launch.from_environment()
    if plan is None:
        check_start(config.output, overwrite, resume, launch)
    with ExitStack() as stack:
        # Process
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
        # A separate stack, closed after the first step; if an error comes before, it is closed with the run's.
        kernel_compilation = stack.enter_context(ExitStack())
        kernel_compilation.enter_context(compiling_kernels(plan, launch))
        training.start(plan, launch, stack)
        phases.end("settings")
        # Before Megatron is imported, because providers patch it during the import.
        runtime = bootstrap(config)
        runtime.platform.warm_up(launch.local_rank)
        phases.end("torch")
        announce("importing transformers")
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401  for data and the self-check: a phase of its own

        phases.end("transformers")

        # Data: before the model is built, which may take minutes
        announce("reading the data")
        config = training.prepare(RunContext(plan, launch, runtime, resume))
        if launch.rank == 0 and (warning := disk_warning(config, plan.info)):
            logger.warning(warning)
        phases.end("data")

        # Model
        megatron = needs(config.engine).megatron
        if megatron:
            self_check.begin()  # the verdict is needed when the model is built
            runtime.load_megatron()
        # Imported modules live as long as the process: excluding them makes garbage collections between steps much faster.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)  # the caller's own objects are among them
        phases.end("Megatron" if megatron else "engine")
        this_run = build_model(training, config, event_log, stack, phases)
        # After the model is built: until then there is nothing to save, and a signal may simply end the process.
        signals = stack.enter_context(StopSignals(launched=launch.agent_store or launch.world_size > 1))
        # Before the first step: if only the export after the last step failed, the whole run would be lost.
        check_results(config, this_run.backend, overwrite)
        training.after_build(this_run)
        this_run.backend.from_rank_0(lambda: lock_output(config.output, stack))
        directory, progress = begin(config, this_run.backend, event_log, overwrite, resume, training.progress_keys)
        inputs = RunInputs(this_run.backend, training.weights(config), training.code(config), training.packages(config))
        inputs.compare(None if progress is None else progress.get(INPUTS))
        training.begin(this_run, progress, lambda: signals.received is not None)
        phases.end("preparing")
        if this_run.main_rank:
            print(f"ready after {phases}", flush=True)

        saves, rows, step = train_steps(training, this_run, directory, inputs, signals, phases, kernel_compilation)
        if training.measurement_stopped or (step < config.steps and not training.finished):
            stopped = signals.received.name if signals.received is not None else "a signal on another rank"
            report_stop(directory, step, stopped, saves.problem)
            return RunResult(step, None, stopped)
        exported = write_results(training, this_run, saves, rows, step)
    # After the process groups are destroyed: the other ranks must not wait for rank 0's upload within a collective's deadline.
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
    """Import the run's plug-ins, which may register its engine, trackers and architecture, and repeat the checks with them.

    Args:
        plan: result of the checks without plug-ins, returned as it is for a run without any; None: not checked yet.
    """
    import_plugins(config.plugins)
    if plan is None or config.plugins:
        plan = check_run(config, world_size, overwrite, plugins_pending=False)
        training.check(config, launch)
    return plan


def build_model(
    training: Training[AnyConfig], config: AnyConfig, event_log: EventLog, stack: ExitStack, phases: StartPhases
) -> Run[AnyConfig]:
    """Build the backend and, with ``lora``, add the adapter that is trained. Collective.

    Args:
        stack: closes the backend.
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
    backend.chat_template, backend.ends = training.chat_template, training.ends
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
        kernel_compilation: closed after the first step, which has compiled all that it needed; a compiler that kept running would
            only use processor time.
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
                    # A signal came before the batch of this step: save a checkpoint of the step before.
                    number -= 1
                    saves.after_step(number, True)
                    break
                with profiler.step(number):
                    # While this is set, other ranks may be in a collective of this step.
                    in_step = True
                    record = training.step(number, batch)
                    in_step = False
                    # An earlier run's files are removed after the first step that changed weights.
                    if not record.skipped:
                        directory.take_over()
                    log.write(record)
                    # After the row is written: an evaluation that fails must not cost the step's figures.
                    training.after_step(number)
                if number == steps_done + 1:
                    phases.end("first step")
                    kernel_compilation.close()
                    run.event_log.event("first_step", **phases.record())
                stopped = signals.received is not None or training.measurement_stopped
                if saves.after_step(number, stopped) or training.finished:
                    break
        except Exception as error:
            # Save neither an incomplete step nor one that other ranks may still be in.
            complete = not in_step or backend.step_count == number
            if complete and backend.step_count > steps_done and can_save_after(error, training, backend):
                saves.save_last(backend.step_count)
            raise
        profiler.finish()
        # For a run that was resumed at its end and took no step.
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
        before_save=directory.take_over,
        may_save=lambda: not directory.holds_earlier_run,
        best_step=lambda: training.best_step,
    )


def run_log(run: Run[AnyConfig], directory: OutputDirectory) -> RunLog:
    """Build the log of a run's steps, which also feeds its trackers."""
    config, steps_done = run.config, run.backend.step_count
    trackers = Trackers(
        config.tracker_options,
        config.output,
        redacted(config.model_dump(mode="json")),
        resumed_after=steps_done,
        on_failure=lambda name, problem: run.event_log.event("tracker_failed", tracker=name, problem=problem),
    )
    return RunLog(
        config.output,
        config.steps,
        trackers,
        enabled=run.main_rank,
        steps_done=steps_done,
        holds_earlier_run=lambda: directory.holds_earlier_run,
    )


def can_save_after(error: Exception, training: Training[AnyConfig], backend: Backend) -> bool:
    """Check whether all ranks can save a checkpoint after ``error``: it is raised on all, and neither save nor weights failed."""
    # A checkpoint is a collective; after an error on this rank only, the others are in a different collective.
    shared = isinstance(error, training.shared_errors) or getattr(error, "on_all_ranks", False)
    everywhere = backend.world_size == 1 or shared
    return everywhere and not isinstance(error, (CheckpointError, NonFiniteError))


# --- results ---


def check_results(config: TrainerConfig, backend: Backend, overwrite: bool) -> None:
    """Check before the first step that the results can be written after the last one. Collective.

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
    from megascend.training.lora.adapter_io import check_target

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
    """Export the model or adapter, plot the run and report its end; return the export's directory, if any. Collective."""
    config = run.config
    # First, so that a failing plot cannot cost the export.
    exported = None
    if config.export:
        best = load_best(training, run, saves, step)
        exported = export(run, saves, step, best)
    if run.main_rank and config.plot:
        path = config.output / "metrics.png"
        try:
            plot_metrics(rows, path, training.title(run), training.panels)
        except (OSError, MissingDependencyError) as error:
            logger.warning("%s cannot be written: %s", path, error)
    values, line = training.result()
    # Not always ``step``: load_best() may have loaded an earlier one.
    exported_step = {} if exported is None else {"exported_step": run.backend.step_count}
    run.event_log.event("finished", step=step, **exported_step, **values)
    if run.main_rank:
        print(line, flush=True)
    return exported


def load_best(training: Training[AnyConfig], run: Run[AnyConfig], saves: CheckpointPolicy, step: int) -> Path | None:
    """Load the best checkpoint if the last step is not the best one, and return its path. Collective."""
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
    """Write the trained model, or only the adapter if one was trained, and return its directory. Collective.

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
            missing = backend.from_rank_0(lambda: write_ends(config.model, path, backend.ends))
            if missing and run.main_rank:
                logger.warning(
                    "the adapter ends its answers with token %s, at which %s does not stop: generate with eos_token_id of %s",
                    ", ".join(map(str, missing)),
                    config.model,
                    path / GENERATION_CONFIG,
                )
    except CheckpointError as error:
        # With ``best`` loaded, the model is no longer that of the last step, and must not be saved as such.
        remedy = saves.keep(step) if best is None else f"{best} still holds the weights to export"
        raise CheckpointError(f"{error}; {remedy}") from error
    return path


def report_stop(directory: OutputDirectory, step: int, signal: str, problem: str | None) -> None:
    """Report that a signal has stopped the run after ``step``.

    Args:
        problem: why there is no checkpoint of that step.
    """
    main_rank = directory.backend.rank == 0
    if directory.holds_earlier_run:
        if main_rank:
            print(
                f"stopped by {signal} before a step was done; the earlier run in {directory.config.output} is unchanged",
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
    """Durations of the consecutive phases from the start of this process to the first step.

    Attributes:
        seconds: wall-clock duration of each completed phase.
        processor_s: user and system time of this process's threads in it; for the rest of ``seconds`` the process waited.
    """

    def __init__(self) -> None:
        """Begin with the start of the process: phase ``Python`` ends here."""
        self.seconds: dict[str, float] = {}
        self.processor_s: dict[str, float] = {}
        # Two clocks: only the system clock has the start of the process, but it may be adjusted later.
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
        """Move ``seconds`` that phase ``part_of`` spent waiting to a separate phase."""
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
