"""Reinforcement learning from an :class:`RlConfig`: what ``megascend rl`` runs on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.app.checkpoint_policy import CheckpointPolicy
from megascend.app.disk_room import disk_warning
from megascend.app.rl.records import PANELS
from megascend.app.run import (
    ADAPTER,
    begin,
    check_lora,
    check_packages,
    check_results,
    draw_metrics,
    export,
    load_tokenizer,
    make_trackers,
    model_line,
    tell_stop,
    with_template_date,
)
from megascend.app.run_log import RunLog
from megascend.app.start import Start
from megascend.app.start_checks import check_settings
from megascend.app.stop_signals import StopSignals
from megascend.config.plugins import import_plugins
from megascend.config.rl import RlConfig
from megascend.errors import CheckpointError, DataError, EngineError
from megascend.rollout.rewards import load_reward

if TYPE_CHECKING:
    from megascend.app.rl.steps import Progress
    from megascend.backend import Backend
    from weightwire.engine import InferenceEngine

logger = logging.getLogger(__name__)
EngineFactory = Callable[[RlConfig], "Sequence[InferenceEngine]"]


@dataclass(frozen=True)
class RlResult:
    """How a run ended. The same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        reward_before, reward_after: of the first evaluation and the last one; NaN without ``evaluation``.
        seconds: from the first step to the last, without start-up and export.
        output: the run directory.
        export: directory of the exported model, or of the adapter if one was trained, or None.
        stopped: the signal that stopped the run before its last step (``"SIGTERM"``), or None. A checkpoint was saved.
    """

    steps: int
    reward_before: float
    reward_after: float
    seconds: float
    output: Path
    export: Path | None
    stopped: str | None = None


def train_rl(
    config: RlConfig,
    *,
    overwrite: bool = False,
    resume: str | Path | None = None,
    engines: EngineFactory | None = None,
) -> RlResult:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 talks to the engines: they sample while the trainer learns, at most ``rollout.max_lag`` steps behind it. What is
    written to ``config.output``, and how a run is stopped and resumed: as :func:`megascend.app.loop.train`. A resumed run has the
    prompts, groups and versions of the checkpoint; what was being sampled is sampled again.

    Args:
        engines: makes the engines on rank 0 in place of those that ``config.engines`` names; the run closes them.

    Raises:
        ConfigError: the output directory holds a run, the reward function cannot be used, or a setting cannot work.
        DataError: prompts cannot be read, or the reward function failed on a response.
        EngineError: an engine refused, is lost, or did not answer in time; on every rank.
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
            if engines is None:
                from megascend.app.rl.engines import check_engines, make_engines

                engines = make_engines
                if start.launch.rank == 0:
                    check_engines(config.engines, config.rollout.controller)
            return run(config, start, overwrite, resume, engines)
    finally:
        start.close()


def run(config: RlConfig, start: Start, overwrite: bool, resume: str | Path | None, engines: EngineFactory) -> RlResult:
    """:func:`train_rl`, after what could be refused at once."""
    launch, event_log = start.launch, start.event_log
    config = config.ending_with(config.steps)
    runtime = start.process(config)

    from megascend.app.rl.rollouts import SharedRollouts
    from megascend.app.rl.set_up import check_objective, fingerprint, make_collector, read_and_check
    from megascend.app.rl.steps import Progress, Steps, evaluate
    from megascend.app.sample_limits import sample_limits
    from megascend.data.order import Batches
    from megascend.weightsync import WeightSync
    from megascend.weightsync.sync import check_transport

    # What cannot work is found before the model is built.
    check_objective(config.objective)
    check_transport(config.sync.transport, runtime.platform.device_type)
    reward = load_reward(config.rollout.reward)
    tokenizer, limits = load_tokenizer(config.model), sample_limits(config, launch.world_size)
    config = with_template_date(config, tokenizer, resume, launch)
    learned_from, evaluated, tokens = read_and_check(config, tokenizer, limits)
    prompts, held_out = [prompt for _, prompt in learned_from], [prompt for _, prompt in evaluated]
    if launch.rank == 0 and (said := disk_warning(config)):
        logger.warning(said)

    # Model: trained itself, or frozen under one adapter
    start.engine(config, runtime)
    adapter = None if config.lora is None else ADAPTER
    launched = launch.agent_store or launch.world_size > 1
    with ExitStack() as stack:
        backend = stack.enter_context(start.backend(config))
        stack.enter_context(event_log.keeping_errors(lambda: backend.step_count + 1))
        signals = stack.enter_context(StopSignals(launched=launched))
        backend.groups.monitor.last_words = lambda error: event_log.error(error, backend.step_count + 1)
        main_rank = backend.rank == 0
        if config.lora is not None:
            backend.add_adapter(ADAPTER, config.lora)
        check_results(config, backend, overwrite)
        beginning = begin(config, backend, event_log, overwrite, resume, ("rollouts", "rl"))
        saved = beginning.progress
        progress = Progress(**saved["rl"]) if saved else Progress()
        number = done = backend.step_count
        if main_rank:
            for line in (start_line(config, backend, len(prompts)), *config.template_remarks()):
                print(line, flush=True)
            if backend.self_check is not None:
                print(backend.self_check.summary(), flush=True)

        # Engines, with the weights that the trainer begins with, whatever they had before
        sources = {"chat template, tokenizer or date": tokens}
        stream = Batches(prompts, 1, config.seed, config.rollout.shuffle, fingerprint(prompts), sources=sources)
        members: list[InferenceEngine] = []
        backend.from_rank_0(lambda: members.extend(engines(config)))
        collector = None
        if main_rank:
            collector = make_collector(config, members, stream, tokenizer, reward, [*learned_from, *evaluated])
        if collector is not None:
            stack.callback(collector.close)
            if saved:
                collector.load_state_dict(saved["rollouts"])
        rollouts = SharedRollouts(backend, collector, config.rollout.timeout_s)
        settings = config.sync
        sync = stack.enter_context(
            WeightSync(
                backend,
                members,
                transport=settings.transport,
                host=settings.host,
                bucket_bytes=settings.bucket_bytes,
                timeout_s=settings.timeout_s,
            )
        )
        # Engines count their versions up, and may have lived longer than this process.
        offset = 1 + rollouts.on_rank_0(lambda collector: max(collector.engine_versions())) - done
        sync.push(version=done + offset, adapter=adapter)
        if saved is None and config.evaluation is not None:
            progress.reward_before = progress.reward_after = evaluate(config.evaluation, rollouts, held_out)
            event_log.event("evaluated", step=0, reward=progress.reward_before)
        rollouts.on_rank_0(lambda collector: collector.start(done, offset))
        if main_rank:
            start.ready()

        # Loop
        saves = CheckpointPolicy(
            backend,
            config,
            event_log,
            lambda: {"rollouts": rollouts.state_dict(), "rl": vars(progress)},
            beginning.take_over,
            lambda: not beginning.waiting,
        )
        trackers = make_trackers(config, event_log, done)
        with RunLog(
            config.output, config.steps, trackers, enabled=main_rank, done=done, waiting=lambda: beginning.waiting
        ) as log:
            steps = Steps(config, backend, rollouts, sync, offset, adapter, held_out, progress)
            for number in range(done + 1, config.steps + 1):
                try:
                    groups = rollouts.take(number - 1, lambda: signals.received is not None)
                except (DataError, EngineError):  # on every rank
                    if number - 1 > done:
                        save_last(saves, number - 1)
                    raise
                if groups is None:
                    number -= 1
                    saves.after_step(number, True)
                    break
                try:
                    record = steps.do(number, groups)
                except EngineError:  # on every rank: an engine was lost after the optimizer's step
                    if backend.step_count > done:
                        save_last(saves, backend.step_count)
                    raise
                if not record.skipped:
                    beginning.take_over()
                log.write(record)
                if number == done + 1:
                    start.first_step()
                if saves.after_step(number, signals.received is not None):
                    break
            if number == config.steps:
                beginning.take_over()
        saves.finish(number)

        # Out
        stopped = exported = None
        if number < config.steps:
            stopped = signals.received.name if signals.received is not None else "a signal on another rank"
            tell_stop(beginning, number, stopped, saves.problem)
        else:
            exported = export(config, backend, saves, number) if config.export else None
            if main_rank and config.plot:
                title = start_line(config, backend, len(prompts)).replace(": ", "\n", 1)
                draw_metrics(config, log, title, PANELS)
            event_log.event("finished", step=number, reward=progress.reward_after)
            if main_rank:
                print(end_line(config, number, progress), flush=True)
    return RlResult(
        number, progress.reward_before, progress.reward_after, progress.seconds, config.output, exported, stopped
    )


def save_last(saves: CheckpointPolicy, step: int) -> None:
    """Save what a run has learned that is about to end with an error, which takes precedence over one of the checkpoint."""
    try:
        saves.after_step(step, True)
        saves.finish(step)
    except CheckpointError as problem:
        logger.warning("step %d could not be saved: %s", step, problem)


def start_line(config: RlConfig, backend: Backend, prompts: int) -> str:
    """One line on what is about to happen."""
    rollout, ranks = config.rollout, backend.world_size
    where = (
        f"{ranks} rank{'s' if ranks > 1 else ''} on {backend.platform.name}, engines: {', '.join(config.engine_names)}"
    )
    steps = f"{config.steps} steps of {rollout.prompts_per_step} x {rollout.group_size} responses"
    return (
        f"{model_line(config, backend)}: {prompts} prompts, {steps}; lag {rollout.max_lag}; {config.precision}; {where}"
    )


def end_line(config: RlConfig, step: int, progress: Progress) -> str:
    """One line on what has happened."""
    evaluated = (
        f", reward {progress.reward_before:.3f} before and {progress.reward_after:.3f} after"
        if config.evaluation is not None
        else ""
    )
    return f"{step} steps in {progress.seconds:.0f} s{evaluated}; see {config.output}"
