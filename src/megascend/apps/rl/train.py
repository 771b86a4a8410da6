"""Reinforcement learning from an :class:`RlConfig`: what ``megascend rl`` runs on every rank."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.rl.records import (
    PANELS,
    RlRecord,
    count_figures,
    group_figures,
    mismatch_figures,
    push_figures,
    reference_figures,
)
from megascend.apps.train.learner import Run, RunContext, Training, model_line, too_many_skips
from megascend.apps.train.loop import run
from megascend.apps.train.preflight import RunPlan
from megascend.apps.train.resume import with_template_date
from megascend.config.rl import BASE, TRAINER, RlConfig
from megascend.errors import DataError, EngineError
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.stop_signals import MeasurementStopped

if TYPE_CHECKING:
    from contextlib import ExitStack

    from megascend.apps.rl.engines import EngineUpdates
    from megascend.apps.rl.reference import ReferenceModel
    from megascend.apps.rl.rollout.buffer import Counts
    from megascend.apps.rl.rollout.environments import Environment
    from megascend.apps.rl.rollout.episodes import Episodes
    from megascend.apps.rl.rollout.group import TrajectoryGroup
    from megascend.apps.rl.rollout.rewards import Reward
    from megascend.apps.rl.rollout_log import RolloutLog
    from megascend.apps.rl.rollouts import SharedRollouts
    from megascend.apps.rl.servers import EngineServers
    from megascend.apps.rl.set_up import PromptData
    from megascend.apps.rl.teacher import Teacher, TeacherScores, TrainerTeacher
    from megascend.apps.rl.trial import EpisodeTrial
    from megascend.apps.train.run_log import RunLog
    from megascend.sync.sync import PushResult
    from weightwire.engine import InferenceEngine

logger = logging.getLogger(__name__)

EngineFactory = Callable[[RlConfig], "Sequence[InferenceEngine]"]


@dataclass(frozen=True)
class RlResult:
    """Result of a run, the same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        reward_before, reward_after: mean reward in the first and in the last evaluation; NaN without ``evaluation``.
        seconds: duration from the first step to the last, without start-up and export.
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
    plan: RunPlan[RlConfig] | None = None,
) -> RlResult:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 talks to the engines: they sample while the trainer learns, at most ``rollout.max_lag`` steps behind it. What is
    written to ``config.output``, and how a run is stopped and resumed: as :func:`megascend.apps.train.train.train`. A resumed run
    has the prompts, groups and versions of the checkpoint; what was being sampled is sampled again.

    Args:
        engines: makes the engines on rank 0 in place of those that ``config.engines`` names; the run closes them.
        plan: result of :func:`megascend.apps.train.preflight.preflight` for ``config``; None: it was not called on this host.

    Raises:
        ConfigError: the output directory holds a run, the reward function cannot be used, or a setting cannot work.
        DataError: prompts cannot be read, or the reward function failed on a response.
        EngineError: an engine refused, is lost, or did not answer in time; on every rank.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
        CheckpointError: there is no checkpoint to resume from, each is damaged, or one could not be written.
    """
    training = ReinforcementLearning(engines)
    end = run(training, config, overwrite, resume, plan)
    totals = training.totals
    return RlResult(
        end.steps, totals.reward_before, totals.reward_after, totals.seconds, config.output, end.export, end.stopped
    )


@dataclass
class Totals:
    """Loop state in a checkpoint, besides model and rollouts.

    Attributes:
        seconds: time spent in steps, including waits for rollouts.
        waited_s: time of these waits.
        tokens: tokens that were learned from.
        reward_before, reward_after: mean reward in the first and in the last evaluation.
        evaluation_due: a signal stopped the evaluation after the last step.
    """

    seconds: float = 0.0
    reward_before: float = math.nan
    reward_after: float = math.nan
    waited_s: float = 0.0
    tokens: int = 0
    evaluation_due: bool = False


@dataclass(frozen=True)
class RlBatch:
    """Groups of a step, with the scores of a served teacher.

    Attributes:
        arrived: time at which the groups were there, of ``time.perf_counter``.
        scores: those of a teacher that is served; None without one.
    """

    groups: Sequence[TrajectoryGroup]
    arrived: float
    scores: TeacherScores | None = None


class ReinforcementLearning(Training[RlConfig]):
    """Learning from responses that inference engines sample and a reward function grades."""

    progress_keys = ("rollouts", "rl")
    shared_errors = (DataError, EngineError)  # SharedRollouts raises those of rank 0 on every rank
    panels = PANELS
    prompts: PromptData
    """Prompts for training and evaluation; set by :meth:`prepare`."""
    _grader: Reward | Environment
    _run: Run[RlConfig]
    _rollouts: SharedRollouts
    _updates: EngineUpdates
    _counts: Counts
    _stop: Callable[[], bool]

    def __init__(self, engines: EngineFactory | None = None) -> None:
        self._make_engines = engines
        self._servers: EngineServers | None = None
        self._teacher: Teacher | None = None
        self._trainer_teacher: TrainerTeacher | None = None
        self.totals = Totals()
        self._engines_ready = False  # the engines have weights, and get prompts
        # Of the last step before this process, whose line is in metrics.jsonl.
        self._late_evaluation: dict[str, Any] | None = None
        self._version = 0
        self._since = 0.0
        self._records: RolloutLog | None = None
        self._reference: ReferenceModel | None = None
        self._evaluated: list[tuple[int, list[TrajectoryGroup]]] = []  # not yet recorded

    def check(self, config: RlConfig, launch: Launch) -> None:
        from megascend.apps.rl.engines import check_engines
        from megascend.apps.rl.servers import check_servers

        # Only rank 0 talks to engines, and only it needs their key.
        if self._make_engines is None and launch.rank == 0:
            check_engines(config.engines, config.rollout.controller, config.teacher_engine)
            check_servers(config)

    def start(self, plan: RunPlan[RlConfig], launch: Launch, stack: ExitStack) -> None:
        from megascend.apps.rl.engines import controller_engines
        from megascend.apps.rl.servers import start_servers

        if self._make_engines is not None:
            return
        if plan.config.started_engines:
            self._servers = start_servers(plan.config, launch, plan.limits, stack)
        if plan.config.rollout.controller is not None and launch.rank == 0:
            # It may be started after the run.
            controller_engines(plan.config, plan.config.rollout.controller)

    def prepare(self, context: RunContext[RlConfig]) -> RlConfig:
        from megascend.apps.rl.engines import response_ends
        from megascend.apps.rl.reference import check_reference
        from megascend.apps.rl.set_up import check_objective, load_grader, read_and_check
        from megascend.apps.rl.teacher import check_teacher
        from megascend.apps.train.teacher_model import check_context
        from megascend.sync.sync import check_transport

        plan, config = context.plan, context.plan.config
        config = config.ending_with(config.steps)
        special = plan.tokenizer.added_tokens_decoder
        # An ordinary token, such as a line break, ends the responses of the run and not those of every use.
        self.ends = [end for end in response_ends(plan.tokenizer, config) if end in special]
        check_objective(config.objective, reference=config.reference is not None)
        check_reference(config, plan.info, warns=context.launch.rank == 0)
        check_teacher(config, plan.info, plan.tokenizer)
        if context.launch.rank == 0 and (replaced := config.replaced_settings):
            logger.warning(
                "objective: %s: without effect, since the teacher's scores are learned in place of rewards (both with "
                "teacher.loss: policy and teacher.rewards: true)",
                ", ".join(f"{name}: {value}" for name, value in replaced.items()),
            )
        if config.teacher is not None and config.teacher.model is not None:
            check_context(config.teacher.model, "teacher.model", plan.limits)
        check_transport(config.sync.transport, context.runtime.platform.device_type)
        self._grader = load_grader(config)
        self._tokenizer, self._max_length = plan.tokenizer, plan.limits.length
        config = with_template_date(config, plan.tokenizer, context.resume, context.launch)
        self.prompts = read_and_check(config, plan.tokenizer, plan.limits, self._grader)
        return config

    def try_episode(self, config: RlConfig) -> EpisodeTrial:
        """Run an episode of the first prompt with a canned response; after :meth:`prepare`. See :func:`trial.try_episode`."""
        from megascend.apps.rl.trial import try_episode

        return try_episode(config, self._episodes(config), self._tokenizer, *self.prompts.train[0])

    def _episodes(self, config: RlConfig) -> Episodes:
        from megascend.apps.rl.set_up import make_episodes

        located = [*self.prompts.train, *self.prompts.held_out]
        return make_episodes(config, self._tokenizer, self._grader, self._max_length, located)

    def after_build(self, run: Run[RlConfig]) -> None:
        """Keep the weights of the reference, which are not those of a checkpoint, and load a teacher of the trainer's."""
        from megascend.apps.rl.reference import ReferenceModel
        from megascend.apps.rl.teacher import TrainerTeacher
        from megascend.apps.train.teacher_model import TeacherModel

        if run.config.reference is not None:
            self._reference = ReferenceModel(run.backend, run.config.reference)
        teacher = run.config.teacher
        if teacher is not None and teacher.engine == TRAINER and teacher.model is not None:
            model = TeacherModel(run.backend, teacher.model, "teacher.model")
            self._trainer_teacher = TrainerTeacher(run.backend, teacher, model)
            run.stack.callback(self._trainer_teacher.close)

    def begin(self, run: Run[RlConfig], progress: dict[str, Any] | None, stop: Callable[[], bool]) -> None:
        """Begin or resume, and send the trainer's weights to the engines."""
        from megascend.apps.data.order import Batches
        from megascend.apps.rl.engines import EngineUpdates, make_engines
        from megascend.apps.rl.rollouts import SharedRollouts
        from megascend.apps.rl.set_up import check_router_replay, fingerprint, make_collector
        from megascend.apps.rl.teacher import make_teacher
        from megascend.sync import WeightSync

        self._run, config, backend, settings = run, run.config, run.backend, run.config.sync
        self._stop = stop
        if config.rollout.router_replay:
            check_router_replay(backend.engine)
        if progress is not None:
            self.totals = Totals(**progress["rl"])
        if run.main_rank:
            for line in (self._start_line(run), *config.template_remarks()):
                print(line, flush=True)
            if backend.self_check is not None:
                print(backend.self_check.summary(), flush=True)
        prompts = [prompt for _, prompt in self.prompts.train]
        sources = {"chat template, tokenizer or date": self.prompts.digest}
        # One at a time: the collector draws as engines become free.
        stream = Batches(prompts, 1, config.seed, config.rollout.shuffle, fingerprint(prompts), sources=sources)
        engines: list[InferenceEngine] = []
        # Through from_rank_0, so that an engine that cannot be made is an error on every rank.
        factory = self._make_engines or (lambda config: make_engines(config, self._servers))
        backend.from_rank_0(lambda: engines.extend(factory(config)))
        collector = None
        if run.main_rank:
            collector = make_collector(config, engines, stream, self._tokenizer, self._episodes(config))
            run.stack.callback(collector.close)
            if progress is not None:
                collector.load_state_dict(progress["rollouts"])
        if self._trainer_teacher is None:
            self._teacher = make_teacher(config, backend, main_rank=run.main_rank)
        if self._teacher is not None:
            if collector is not None:
                collector.on_finished = self._teacher.ask_ahead
            run.stack.callback(self._teacher.close)
            self._teacher.check()
        environment = config.rollout.environment
        # An episode may take its time between two responses.
        patience_s = config.rollout.timeout_s + (environment.timeout_s if environment is not None else 0)
        self._rollouts = SharedRollouts(backend, collector, patience_s)
        sync = run.stack.enter_context(
            WeightSync(
                backend,
                engines,
                transport=settings.transport,
                host=settings.host,
                bucket_bytes=settings.bucket_bytes,
                timeout_s=settings.timeout_s,
                sharded=settings.sharded,
                mode=settings.mode,
                full_every=settings.full_every,
            )
        )
        self._wake_engines()
        self._updates = EngineUpdates(backend, self._rollouts, sync, run.adapter)
        if not self._updates.begin(stop):
            return
        self._rollouts.recover = self._updates.recover
        if not self._evaluate_before_loop():
            return
        # Before the first prompt: episodes that end while the loop is prepared count for the first step.
        self._counts = self._rollouts.counts()
        # After the push and the evaluation: no training prompt is sampled with other weights.
        steps, offset = backend.step_count, self._updates.offset
        self._rollouts.on_rank_0(lambda collector: collector.start(steps, offset))
        self._engines_ready = True

    def _evaluate_before_loop(self) -> bool:
        """Evaluate before the first step, or what a signal stopped after the last one; False if a signal stops it."""
        run, totals, number = self._run, self.totals, self._run.backend.step_count
        # A run that was stopped while it waited for engines has a checkpoint of step 0, without an evaluation.
        first = number == 0 and math.isnan(totals.reward_before)
        if run.config.evaluation is None or not (first or totals.evaluation_due):
            return True
        try:
            totals.reward_after, failed = self._evaluate(number)
        except MeasurementStopped:
            self.measurement_stopped = True
            return False
        totals.evaluation_due = False
        if first:
            totals.reward_before = totals.reward_after
            run.event_log.event("evaluated", step=0, reward=totals.reward_after, failed=failed)
        else:
            self._late_evaluation = {"eval_reward": totals.reward_after, "eval_failed": failed}
        return True

    def start_loop(self, log: RunLog) -> None:
        run = self._run
        self._version = run.backend.step_count
        if self._late_evaluation is not None:
            log.complete_last(self._version, self._late_evaluation)
        if run.main_rank:
            from megascend.apps.rl.rollout_log import RolloutLog

            self._records = RolloutLog(run.config, self._decode, log, run.backend.step_count)
            run.stack.callback(self._records.close)
        self._since = time.perf_counter()

    def next_batch(self, number: int, stop: Callable[[], bool]) -> RlBatch | None:
        if not self._engines_ready:
            return None
        groups = self._rollouts.take(number - 1, stop)
        if groups is None:
            return None
        arrived, scores = time.perf_counter(), None
        # Here, not in the step: if a teacher is lost, or a signal comes while it is awaited, the last step can be saved.
        if self._teacher is not None:
            try:
                scores = self._teacher.scores(groups, stop)
            finally:
                if scores is None:
                    self._rollouts.put_back(groups)
            if scores is None:
                return None
        return RlBatch(groups, arrived, scores)

    def step(self, number: int, batch: RlBatch) -> RlRecord:
        """Learn from groups, update the engines, evaluate."""
        from megascend.apps.rl.learn import learn

        run, groups, scores = self._run, batch.groups, batch.scores
        config, backend = run.config, run.backend
        interval = config.objective.measure_every
        # Measured before the step: afterwards the weights are not those that the log-probabilities belong to.
        measured = interval > 0 and number % interval == 0
        with self._engines_asleep():
            if self._trainer_teacher is not None:
                scores = self._trainer_teacher.scores(groups)
            learned = learn(
                backend,
                groups,
                config.objective,
                run.adapter,
                measured=measured,
                reference=self._reference,
                teacher=scores,
            )
            step = backend.optimizer_step()
        if step.skipped_in_a_row > config.max_skipped_steps:
            raise too_many_skips(config, number, step.skipped_in_a_row, None)
        pushed: list[PushResult] = []
        stepped = time.perf_counter()
        if number % config.sync.every == 0 or number == config.steps:
            # Only now may prompts be dispatched that depend on these weights.
            pushed, self._version = self._updates.push(number), number
            # Engines that were lost and are back get these weights, or later ones.
        synced, evaluation = time.perf_counter(), (None, None)
        if config.evaluation is not None and (number % config.evaluation.every == 0 or number == config.steps):
            try:
                evaluation = self._evaluate(number)
                self.totals.reward_after = evaluation[0]
            except MeasurementStopped:
                self.measurement_stopped = self.totals.evaluation_due = True
        dropped = self._rollouts.take_dropped()
        if self._records is not None:
            self._records.write(number, groups, dropped, self._evaluated, learned.penalised)
        self._evaluated = []
        earlier, self._counts = self._counts, self._rollouts.counts()
        now = time.perf_counter()
        seconds, waited = now - self._since, batch.arrived - self._since
        self._since = now
        self.totals.seconds += seconds
        self.totals.waited_s += waited
        self.totals.tokens += learned.result.tokens
        return RlRecord(
            step=number,
            skipped=step.skipped,
            seconds=self.totals.seconds,
            eval_reward=evaluation[0],
            eval_failed=evaluation[1],
            loss=learned.result.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            version=self._version,
            teacher_kl=None if scores is None else scores.divergence(groups),
            router_replay_changed=learned.result.metrics.get("router_replay_changed"),
            tokens=learned.result.tokens,
            tokens_per_s=learned.result.tokens / seconds,
            wait_s=waited,
            idle=waited / seconds,
            entropy=learned.entropy,
            sync_s=synced - stepped,
            **push_figures(pushed),
            **group_figures(groups, number - 1),
            **count_figures(earlier, self._counts),
            **mismatch_figures(learned.mismatch),
            **reference_figures(learned.divergence),
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        # With special tokens: they show where turns begin and end.
        return str(self._tokenizer.decode(list(tokens)))

    @contextlib.contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Free the memory of engines on the trainer's GPUs within the context, if ``placement.sleep`` is set. Collective."""
        if not self._run.config.placement.sleep:
            yield
            return
        backend = self._run.backend
        backend.from_rank_0(lambda: None if self._servers is None else self._servers.sleep())
        yield
        # Not after an error: the run ends, and the servers with it.
        self._wake_engines()

    def _wake_engines(self) -> None:
        """Give engines their memory back. Collective."""
        if self._run.config.placement.sleep:
            backend = self._run.backend
            backend.platform.free_cached_memory()
            backend.from_rank_0(lambda: None if self._servers is None else self._servers.wake())

    def _evaluate(self, step: int) -> tuple[float, int]:
        """Return the mean reward on the prompts of ``evaluation``, with the engines' weights after ``step``, and its failures."""
        settings = self._run.config.evaluation
        assert settings is not None
        held_out = [prompt for _, prompt in self.prompts.held_out]
        reward, failed = self._rollouts.evaluate(
            held_out, settings.temperature, settings.samples, self._updates.offset, self._stop
        )
        if failed and self._run.main_rank:
            episodes = len(held_out) * settings.samples
            logger.warning(
                "evaluation after step %d: %d of %d episodes failed and count as 0 or less", step, failed, episodes
            )
        self._evaluated.append((step, self._rollouts.evaluated))
        return reward, failed

    def progress(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts.state_dict(), "rl": vars(self.totals)}

    def weights(self, config: RlConfig) -> dict[str, Path]:
        """Return the directories of base model, reference and teacher, unless a checkpoint contains them."""
        weights = super().weights(config)
        if config.reference is not None:
            base = config.reference.model == BASE
            weights["reference.model"] = config.model if base else Path(config.reference.model)
        if config.teacher is not None and config.teacher.model is not None:
            weights["teacher.model"] = config.teacher.model
        return weights

    def code(self, config: RlConfig) -> dict[str, str]:
        """Return the names of reward function and environment."""
        from megascend.apps.rl.rollout.verifiers import PREFIX

        code, rollout = super().code(config), config.rollout
        if rollout.reward is not None:
            code["rollout.reward"] = rollout.reward
        if rollout.environment is not None and not rollout.environment.name.startswith(PREFIX):
            code["rollout.environment"] = rollout.environment.name
        return code

    def packages(self, config: RlConfig) -> dict[str, str]:
        """Return verifiers and the package of an environment of its format, which may be a part of it."""
        from megascend.apps.rl.rollout.verifiers import PREFIX

        environment = config.rollout.environment
        if environment is None or not environment.name.startswith(PREFIX):
            return {}
        return {
            "rollout.environment": environment.name.removeprefix(PREFIX),
            "rollout.environment: verifiers": "verifiers",
        }

    def title(self, run: Run[RlConfig]) -> str:
        return self._start_line(run).replace(": ", "\n", 1)

    def _start_line(self, run: Run[RlConfig]) -> str:
        """Return a one-line description of the model, the prompts, the number of steps and the devices."""
        config, rollout, ranks = run.config, run.config.rollout, run.backend.world_size
        engines = ", ".join(config.engine_names)
        device = f"{ranks} rank{'s' if ranks > 1 else ''} on {run.backend.platform.name}, engines: {engines}"
        steps = f"{config.steps} steps of {rollout.prompts_per_step} x {rollout.group_size} responses"
        return (
            f"{model_line(config, run.backend)}: {len(self.prompts.train)} prompts, {steps}; lag {rollout.max_lag}; "
            f"{config.precision}; {device}"
        )

    def result(self) -> tuple[dict[str, Any], str]:
        """Return the last reward, the idle share and the speed, and a one-line summary of the run."""
        config, totals = self._run.config, self.totals
        evaluated = ""
        if config.evaluation is not None:
            evaluated = f", reward {totals.reward_before:.3f} before and {totals.reward_after:.3f} after"
        values = {"reward": totals.reward_after}
        speed = ""
        if totals.seconds:  # a run that is resumed at its last step takes none
            values |= {"idle": totals.waited_s / totals.seconds, "tokens_per_s": totals.tokens / totals.seconds}
            speed = f" (trainer idle {values['idle']:.0%}, {values['tokens_per_s']:,.0f} tokens/s)"
        line = f"{self._run.backend.step_count} steps in {totals.seconds:.0f} s{speed}{evaluated}; see {config.output}"
        return values, line
