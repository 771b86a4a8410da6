"""The loop of a run of any kind, on one rank: process, data, model, checkpoint, steps, results.

What differs between kinds of run is in :mod:`megascend.apps.train.learner`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.tracking.trackers import Trackers
from megascend.apps.train.callbacks import Callback, Callbacks
from megascend.apps.train.checkpoint_policy import CheckpointPolicy
from megascend.apps.train.event_log import EventLog
from megascend.apps.train.learner import Learner, Run, RunContext, RunData, RunKind, RunResult, too_many_skips
from megascend.apps.train.object_storage import Uploads, fetch_checkpoint
from megascend.apps.train.prefetch import SelfCheckPrefetch, compiling_kernels
from megascend.apps.train.preflight import AnyConfig, RunPlan, check_run, disk_warning
from megascend.apps.train.profile import StepProfiler
from megascend.apps.train.results import check_results, report_stop, upload, write_results
from megascend.apps.train.resume import begin, check_start, may_write
from megascend.apps.train.run_backend import ADAPTER, bootstrap, make_backend
from megascend.apps.train.run_directory import lock_output
from megascend.apps.train.run_inputs import INPUTS, compare_inputs, read_inputs
from megascend.apps.train.run_log import RunLog
from megascend.apps.train.start_phases import StartPhases
from megascend.config.plugins import import_plugins
from megascend.errors import CheckpointError, NonFiniteError, redacted
from megascend.runtime.bootstrap.engines import needs
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.lasting_output import LastingOutput
from megascend.runtime.stop_signals import StopSignals
from megascend.surroundings import announce

if TYPE_CHECKING:
    from megascend.apps.train.run_directory import OutputDirectory
    from megascend.backend import Backend

logger = logging.getLogger(__name__)
FROZEN_BY_PYTHON = 2000
"""More objects than an interpreter freezes when it starts, some hundred from Python 3.12 on, and fewer than any program does."""


def run(
    kind: RunKind[AnyConfig],
    config: AnyConfig,
    overwrite: bool,
    resume: str | Path | None,
    plan: RunPlan[AnyConfig] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult[Any]:
    """Run as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Args:
        plan: result of :func:`megascend.apps.train.preflight.preflight` for ``config``; None: it was not called on this host.
        callbacks: as many on every rank; called on rank 0, after those that ``config`` names.
    """
    phases = StartPhases()
    launch = Launch.from_environment()
    if plan is None:
        if launch.rank == 0:
            fetch_checkpoint(config, overwrite, resume)
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
        # Its last copy is waited for after the process groups are destroyed: no other rank's deadline runs meanwhile.
        remote = config.checkpoint.remote is not None and launch.rank == 0
        uploads = stack.enter_context(Uploads(config.checkpoint, event_log)) if remote else None
        plan = plan_with_plugins(kind, config, launch, overwrite, plan)
        self_check = SelfCheckPrefetch(plan, launch.rank)
        stack.callback(self_check.close)
        # A separate stack, closed after the first step; if an error comes before, it is closed with the run's.
        kernel_compilation = stack.enter_context(ExitStack())
        kernel_compilation.enter_context(compiling_kernels(plan, launch))
        kind.start(plan, launch, stack)
        phases.end("settings")
        # Before Megatron is imported, because providers patch it during the import.
        runtime = bootstrap(config)
        runtime.platform.warm_up(launch.local_rank)
        phases.end("torch")
        announce("importing transformers")
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401  for data and the self-check: a phase of its own

        phases.end("transformers")
        run_callbacks = Callbacks(config, callbacks)

        # Data: before the model is built, which may take minutes
        announce("reading the data")
        data = kind.read(RunContext(plan, launch, runtime, resume))
        config = data.config
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
        # What the caller has frozen stays frozen: in a fork, it may own threads that only the parent has.
        if gc.get_freeze_count() < FROZEN_BY_PYTHON:
            stack.callback(gc.unfreeze)  # the caller's own objects are among them
        gc.freeze()
        phases.end("Megatron" if megatron else "engine")
        this_run = build_model(data, event_log, launch, stack, phases)
        # Before the first step: if only the export after the last step failed, the whole run would be lost.
        check_results(config, this_run.backend, overwrite)
        this_run.backend.from_rank_0(lambda: None if uploads is None else uploads.check())
        initial = data.evaluate_initial_model(this_run)

        # Checkpoint
        this_run.backend.from_rank_0(lambda: lock_output(config.output, stack))
        directory, progress = begin(config, this_run.backend, event_log, overwrite, resume, data.progress_keys)
        # A restarted command may still have --overwrite: what a resumed run has copied before is its own.
        if uploads is not None and overwrite and progress is None:
            directory.on_take_over = uploads.clear
        inputs = read_inputs(this_run.backend, data.inputs)
        if progress is not None and INPUTS in progress:
            compare_inputs(data.inputs, inputs, progress[INPUTS], launch.rank)

        # Steps
        with run_log(directory) as log:
            learner = data.learner(this_run, initial, progress, log)
            run_callbacks.start(this_run)
            earlier = log.rows[-1:]
            learner.start()
            if log.rows[-1:] != earlier:  # what a signal had stopped was measured, and completes that step's row
                run_callbacks.call("on_evaluate", dict(log.rows[-1]))
            phases.end("preparing")
            if this_run.main_rank:
                print(f"ready after {phases}", flush=True)
            on_save = partial(run_callbacks.call, "on_save")
            saves = CheckpointPolicy(directory, learner, inputs, on_save, uploads)
            step = train_steps(this_run, learner, saves, directory, log, run_callbacks, phases, kernel_compilation)
            stopping_callback = run_callbacks.check()

        # Results
        if learner.stopped or (step < config.steps and not learner.finished):
            signal = this_run.signals.received
            stopped = signal.name if signal is not None else stopping_callback or "a signal on another rank"
            report_stop(directory, step, stopped, saves.problem)
            result = RunResult(step, None, stopped, learner.totals)
        else:
            exported = write_results(this_run, learner, saves, log.rows, step)
            if uploads is not None and exported is not None:
                uploads.add_export(exported)
            result = RunResult(step, exported, None, learner.totals)
        run_callbacks.call("on_end", result)
        run_callbacks.check()
    # After the process groups are destroyed: the other ranks must not wait for rank 0's upload within a collective's deadline.
    if config.push is not None and result.export is not None and launch.rank == 0:
        upload(result.export, config.push, event_log, step)
    return result


def plan_with_plugins(
    kind: RunKind[AnyConfig],
    config: AnyConfig,
    launch: Launch,
    overwrite: bool,
    plan: RunPlan[AnyConfig] | None,
) -> RunPlan[AnyConfig]:
    """Import the run's plug-ins, which may register its engine, trackers and architecture, and repeat the checks with them.

    Args:
        plan: result of the checks without plug-ins, returned as it is for a run without any; None: not checked yet.
    """
    import_plugins(config.plugins)
    if plan is None or config.plugins:
        world_size = launch.world_size if plan is None else plan.world_size
        plan = check_run(config, world_size, overwrite, plugins_pending=False)
        kind.check(config, launch)
    return plan


def build_model(
    data: RunData[AnyConfig], event_log: EventLog, launch: Launch, stack: ExitStack, phases: StartPhases
) -> Run[AnyConfig]:
    """Build the backend and, with ``lora``, add the adapter that is trained. Collective.

    Args:
        stack: closes the backend.
    """
    config = data.config
    backend = stack.enter_context(make_backend(data.model_config))
    phases.end("model")
    if backend.self_check is not None:
        phases.split_off("self-check", "model", backend.self_check_s)
    stack.enter_context(event_log.recording_errors(lambda: backend.step_count + 1))
    adapter = None if config.lora is None else ADAPTER
    if adapter is not None:
        backend.add_adapter(adapter, config.lora)
    # The watchdog ends a process that is blocked in a collective and cannot raise: the error file is its only trace.
    backend.groups.monitor.on_fatal = lambda error: event_log.error(error, backend.step_count + 1)
    backend.chat_template, backend.ends = data.chat_template, data.ends
    opened = stack.enter_context(ExitStack())
    # After the model is built: until then there is nothing to save, and a signal may simply end the process.
    signals = stack.enter_context(StopSignals(launched=launch.agent_store or launch.world_size > 1))
    return Run(config, backend, event_log, adapter, opened, signals)


def train_steps(
    run: Run[AnyConfig],
    learner: Learner,
    saves: CheckpointPolicy,
    directory: OutputDirectory,
    log: RunLog,
    callbacks: Callbacks,
    phases: StartPhases,
    kernel_compilation: ExitStack,
) -> int:
    """Train up to the last step, to a signal or to a callback's stop; return the last step.

    Args:
        kernel_compilation: closed after the first step, which has compiled all that it needed; a compiler that kept running would
            only use processor time.
    """
    config, backend = run.config, run.backend
    number = steps_done = backend.step_count
    # The peak while loading is not the peak of training.
    backend.platform.reset_peak_memory()
    steps = range(steps_done + 1, config.steps + 1)
    profiler = StepProfiler(config.profile, config.output, backend.platform, backend.rank, steps)
    log.start()
    in_step = False
    try:
        for number in steps:
            if learner.finished:  # resumed at its end
                number -= 1
                break
            batch = learner.next_batch(number)
            if batch is None:
                # A signal came before the batch of this step: save a checkpoint of the step before.
                number -= 1
                saves.after_step(number, True)
                break
            with profiler.step(number):
                # While this is set, other ranks may be in a collective of this step.
                in_step = True
                record = learner.step(number, batch)
                in_step = False
                # An earlier run's files are removed after the first step that changed weights.
                if not record.skipped:
                    directory.take_over()
                log.write(record)
                callbacks.step(record)
                # After the row is written: metrics.jsonl ends with the skipped steps, and an evaluation that fails does not
                # cost the step's figures.
                if learner.skipped_in_a_row > config.max_skipped_steps:
                    raise too_many_skips(config, number, learner.skipped_in_a_row, learner.save_batch(number, batch))
                learner.after_step(number)
            if number == steps_done + 1:
                phases.end("first step")
                kernel_compilation.close()
                run.event_log.event("first_step", **phases.record())
            stop, save = callbacks.requests()
            if saves.after_step(number, run.stop or learner.stopped or stop, save) or learner.finished:
                break
    except Exception as error:
        # Save neither an incomplete step nor one that other ranks may still be in.
        complete = not in_step or backend.step_count == number
        if complete and backend.step_count > steps_done and can_save_after(error, learner, backend):
            saves.save_last(backend.step_count)
        raise
    profiler.finish()
    # For a run that was resumed at its end and took no step.
    if number == config.steps or learner.finished:
        directory.take_over()
    saves.finish(number)
    return number


def run_log(directory: OutputDirectory) -> RunLog:
    """Build the log of a run's steps, which also feeds its trackers."""
    config, event_log = directory.config, directory.event_log
    trackers = Trackers(
        config.tracker_options,
        config.output,
        redacted(config.model_dump(mode="json")),
        resumed_after=directory.backend.step_count,
        on_failure=lambda name, problem: event_log.event("tracker_failed", tracker=name, problem=problem),
    )
    return RunLog(directory, trackers)


def can_save_after(error: Exception, learner: Learner, backend: Backend) -> bool:
    """Check whether all ranks can save a checkpoint after ``error``: it is raised on all, and neither save nor weights failed."""
    # A checkpoint is a collective; after an error on this rank only, the others are in a different collective.
    shared = isinstance(error, learner.shared_errors) or getattr(error, "on_all_ranks", False)
    everywhere = backend.world_size == 1 or shared
    return everywhere and not isinstance(error, (CheckpointError, NonFiniteError))
