"""Reinforcement learning: the prompts of a run, and the learner that samples, grades and learns from responses."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.data.order import Batches
from megascend.apps.rl.engines import EngineUpdates, response_ends
from megascend.apps.rl.learn import learn
from megascend.apps.rl.records import (
    PANELS,
    RlRecord,
    count_figures,
    group_figures,
    mismatch_figures,
    push_figures,
    reference_figures,
)
from megascend.apps.rl.reference import ReferenceModel, check_reference
from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.apps.rl.rollout.verifiers import PREFIX
from megascend.apps.rl.rollout_log import RolloutLog
from megascend.apps.rl.rollouts import SharedRollouts
from megascend.apps.rl.set_up import (
    PromptData,
    check_objective,
    check_router_replay,
    fingerprint,
    load_grader,
    make_collector,
    make_episodes,
    read_and_check,
)
from megascend.apps.rl.teacher import Teacher, TeacherScores, TrainerTeacher, check_teacher, make_teacher
from megascend.apps.train.learner import Learner, Run, RunContext, RunData, model_line
from megascend.apps.train.resume import with_template_date
from megascend.apps.train.run_inputs import InputNames
from megascend.apps.train.run_log import RunLog
from megascend.apps.train.teacher_model import TeacherModel, check_context
from megascend.config.rl import BASE, TRAINER, RlConfig
from megascend.errors import DataError, EngineError
from megascend.runtime.stop_signals import MeasurementStopped
from megascend.sync import WeightSync
from megascend.sync.push import PushResult
from megascend.sync.sync import check_transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.rl.rollout.environments import Environment
    from megascend.apps.rl.rollout.episodes import Episodes
    from megascend.apps.rl.rollout.rewards import Reward
    from megascend.apps.rl.servers import EngineServers
    from weightwire.engine import InferenceEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RlData(RunData[RlConfig]):
    """Prompts of a run, and what grades and samples their responses.

    Attributes:
        max_length: most tokens of a trajectory.
        make_engines: makes the engines on rank 0; the run closes them.
        servers: engines that the run has started, which sleep and wake with it; None without any, and on all ranks but 0.
    """

    progress_keys = ("rollouts", "rl")
    config: RlConfig
    ends: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    grader: Reward | Environment
    prompts: PromptData
    make_engines: Callable[[RlConfig], Sequence[InferenceEngine]]
    servers: EngineServers | None
    chat_template: str | None = None

    @classmethod
    def read(
        cls,
        context: RunContext[RlConfig],
        make_engines: Callable[[RlConfig], Sequence[InferenceEngine]],
        servers: EngineServers | None,
    ) -> RlData:
        """Read the prompts of a run; see :meth:`megascend.apps.train.learner.RunKind.read`."""
        plan, config = context.plan, context.plan.config
        config = config.ending_with(config.steps)
        special = plan.tokenizer.added_tokens_decoder
        # An ordinary token, such as a line break, ends the responses of the run and not those of every use.
        ends = [end for end in response_ends(plan.tokenizer, config) if end in special]
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
        grader = load_grader(config)
        config = with_template_date(config, plan.tokenizer, context.resume, context.launch)
        return cls(
            config=config,
            ends=ends,
            tokenizer=plan.tokenizer,
            max_length=plan.limits.length,
            grader=grader,
            prompts=read_and_check(config, plan.tokenizer, plan.limits, grader),
            make_engines=make_engines,
            servers=servers,
        )

    @property
    def inputs(self) -> InputNames:
        return input_names(self.config)

    def evaluate_initial_model(self, run: Run[RlConfig]) -> InitialModels:
        """Keep the weights of the reference, which are not those of a checkpoint, and load a teacher of the trainer's."""
        reference = teacher = None
        if run.config.reference is not None:
            reference = ReferenceModel(run.backend, run.config.reference)
        settings = run.config.teacher
        if settings is not None and settings.engine == TRAINER and settings.model is not None:
            model = TeacherModel(run.backend, settings.model, "teacher.model")
            run.stack.callback(model.close)
            teacher = TrainerTeacher(run.backend, settings, model)
        return InitialModels(reference, teacher)

    def learner(
        self, run: Run[RlConfig], initial: InitialModels, progress: dict[str, Any] | None, log: RunLog
    ) -> RlLearner:
        return RlLearner(self, run, initial, progress or {}, log)

    def episodes(self) -> Episodes:
        located = [*self.prompts.train, *self.prompts.held_out]
        return make_episodes(self.config, self.tokenizer, self.grader, self.max_length, located)


def input_names(config: RlConfig) -> InputNames:
    """Return what a run reads besides its prompts: base model, reference and teacher; reward function and environment."""
    names, environment = InputNames.common(config), config.rollout.environment
    if config.reference is not None:
        base = config.reference.model == BASE
        names.weights["reference.model"] = config.model if base else Path(config.reference.model)
    if config.teacher is not None and config.teacher.model is not None:
        names.weights["teacher.model"] = config.teacher.model
    if config.rollout.reward is not None:
        names.code["rollout.reward"] = config.rollout.reward
    if environment is not None and not environment.name.startswith(PREFIX):
        names.code["rollout.environment"] = environment.name
    elif environment is not None:
        # The environment's package may be a part of verifiers.
        names.packages["rollout.environment"] = environment.name.removeprefix(PREFIX)
        names.packages["rollout.environment: verifiers"] = "verifiers"
    return names


@dataclass(frozen=True)
class InitialModels:
    """Models that are read before a checkpoint is loaded: the reference, and a teacher that the trainer computes."""

    reference: ReferenceModel | None
    teacher: TrainerTeacher | None


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


class RlLearner(Learner):
    """Learns from responses that inference engines sample and a reward function grades."""

    shared_errors = (DataError, EngineError)  # SharedRollouts raises those of rank 0 on every rank
    panels = PANELS
    totals: Totals

    def __init__(
        self, data: RlData, run: Run[RlConfig], initial: InitialModels, progress: dict[str, Any], log: RunLog
    ) -> None:
        """
        Args:
            progress: :meth:`state` of the checkpoint that the run resumes from; empty if it begins.
        """
        self._run, self._log, self._initial = run, log, initial
        self._prompts, self._tokenizer, self._servers = data.prompts, data.tokenizer, data.servers
        config, backend, settings = run.config, run.backend, run.config.sync
        self.totals = Totals(**progress.get("rl", {}))
        self._version = backend.step_count
        self._evaluated: list[tuple[int, list[TrajectoryGroup]]] = []  # not yet recorded
        if config.rollout.router_replay:
            check_router_replay(backend.engine)
        if run.main_rank:
            for line in (self._start_line(), *config.template_remarks()):
                print(line, flush=True)
            if backend.self_check is not None:
                print(backend.self_check.summary(), flush=True)
        prompts = [prompt for _, prompt in data.prompts.train]
        sources = {"chat template, tokenizer or date": data.prompts.digest}
        # One at a time: the collector draws as engines become free.
        stream = Batches(prompts, 1, config.seed, config.rollout.shuffle, fingerprint(prompts), sources=sources)
        engines: list[InferenceEngine] = []
        # Through from_rank_0, so that an engine that cannot be made is an error on every rank.
        backend.from_rank_0(lambda: engines.extend(data.make_engines(config)))
        collector = None
        if run.main_rank:
            collector = make_collector(config, engines, stream, data.tokenizer, data.episodes())
            run.stack.callback(collector.close)
            if "rollouts" in progress:
                collector.load_state_dict(progress["rollouts"])
        self._teacher: Teacher | None = None
        if initial.teacher is None:
            self._teacher = make_teacher(config, backend, main_rank=run.main_rank)
        if self._teacher is not None:
            if collector is not None:
                collector.on_finished = self._teacher.ask_ahead
            run.stack.callback(self._teacher.close)
            self._teacher.check()
        environment = config.rollout.environment
        # An episode may take its time between two responses.
        patience_s = config.rollout.timeout_s + (environment.timeout_s if environment is not None else 0)
        self._collector, self._rollouts = collector, SharedRollouts(backend, collector, patience_s)
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
        self._records: RolloutLog | None = None
        if run.main_rank:
            self._records = RolloutLog(config, self._decode, log, backend.step_count)
            run.stack.callback(self._records.close)
        self._counts = self._rollouts.counts()
        self._since = time.perf_counter()

    def start(self) -> None:
        """Send the trainer's weights to the engines, evaluate them if that is due, and let them sample."""
        if not self._updates.begin(self._signalled):
            self.stopped = True
            return
        self._rollouts.recover = self._updates.recover
        try:
            self._evaluate_before_steps()
        except MeasurementStopped:
            self.stopped = True
            return
        # Before the first prompt: episodes that end while the loop is prepared count for the first step.
        self._counts = self._rollouts.counts()
        # After the push and the evaluation: no training prompt is sampled with other weights.
        steps, offset = self._run.backend.step_count, self._updates.offset
        self._rollouts.on_rank_0(lambda collector: collector.start(steps, offset))
        self._since = time.perf_counter()

    def _evaluate_before_steps(self) -> None:
        """Evaluate before the first step, or what a signal stopped after the last one."""
        run, totals, number = self._run, self.totals, self._run.backend.step_count
        # A run that was stopped while it waited for engines has a checkpoint of step 0, without an evaluation.
        first = number == 0 and math.isnan(totals.reward_before)
        if run.config.evaluation is None or not (first or totals.evaluation_due):
            return
        totals.reward_after, failed = self._evaluate(number)
        totals.evaluation_due = False
        if first:
            totals.reward_before = totals.reward_after
            run.event_log.event("evaluated", step=0, reward=totals.reward_after, failed=failed)
        else:
            self._log.complete_last(number, {"eval_reward": totals.reward_after, "eval_failed": failed})

    def next_batch(self, number: int) -> RlBatch | None:
        if self.stopped:
            return None
        groups = self._rollouts.take(number - 1, self._signalled)
        if groups is None:
            return None
        arrived, scores = time.perf_counter(), None
        # Here, not in the step: if a teacher is lost, or a signal comes while it is awaited, the last step can be saved.
        if self._teacher is not None:
            try:
                scores = self._teacher.scores(groups, self._signalled)
            finally:
                if scores is None and self._collector is not None:
                    self._collector.put_back(groups)
            if scores is None:
                return None
        return RlBatch(groups, arrived, scores)

    def step(self, number: int, batch: RlBatch) -> RlRecord:
        """Learn from groups, update the engines, evaluate."""
        run, groups, scores, totals = self._run, batch.groups, batch.scores, self.totals
        config, backend = run.config, run.backend
        interval = config.objective.measure_every
        # Measured before the step: afterwards the weights are not those that the log-probabilities belong to.
        measured = interval > 0 and number % interval == 0
        with self._engines_asleep():
            if self._initial.teacher is not None:
                scores = self._initial.teacher.scores(groups)
            learned = learn(
                backend,
                groups,
                config.objective,
                run.adapter,
                measured=measured,
                reference=self._initial.reference,
                teacher=scores,
            )
            step = backend.optimizer_step()
        self.skipped_in_a_row = step.skipped_in_a_row
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
                totals.reward_after = evaluation[0]
            except MeasurementStopped:
                self.stopped = totals.evaluation_due = True
        if self._collector is not None and self._records is not None:
            dropped = self._collector.take_dropped()
            self._records.write(number, groups, dropped, self._evaluated, learned.penalised)
        self._evaluated = []
        earlier, self._counts = self._counts, self._rollouts.counts()
        now = time.perf_counter()
        seconds, waited = now - self._since, batch.arrived - self._since
        self._since = now
        totals.seconds += seconds
        totals.waited_s += waited
        totals.tokens += learned.result.tokens
        return RlRecord(
            step=number,
            skipped=step.skipped,
            seconds=totals.seconds,
            eval_reward=evaluation[0],
            eval_failed=evaluation[1],
            loss=learned.result.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            version=self._version,
            teacher_kl=None if scores is None else scores.divergence(groups),
            router_replay_changed=learned.result.metrics.get("router_replay_changed"),
            tokens=learned.result.tokens,
            shared_tokens=learned.result.shared_tokens,
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

    def state(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts.state_dict(), "rl": vars(self.totals)}

    def title(self) -> str:
        return self._start_line().replace(": ", "\n", 1)

    def result(self) -> tuple[dict[str, Any], str]:
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

    def _signalled(self) -> bool:
        return self._run.stop

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
        held_out = [prompt for _, prompt in self._prompts.held_out]
        reward, failed = self._rollouts.evaluate(
            held_out, settings.temperature, settings.samples, self._updates.offset, self._signalled
        )
        if failed and self._run.main_rank:
            episodes = len(held_out) * settings.samples
            logger.warning(
                "evaluation after step %d: %d of %d episodes failed and count as 0 or less", step, failed, episodes
            )
        self._evaluated.append((step, self._rollouts.evaluated))
        return reward, failed

    def _start_line(self) -> str:
        """Return a one-line description of the model, the prompts, the number of steps and the devices."""
        config, backend = self._run.config, self._run.backend
        rollout, ranks, engines = config.rollout, backend.world_size, ", ".join(config.engine_names)
        device = f"{ranks} rank{'s' if ranks > 1 else ''} on {backend.platform.name}, engines: {engines}"
        steps = f"{config.steps} steps of {rollout.prompts_per_step} x {rollout.group_size} responses"
        return (
            f"{model_line(config, backend)}: {len(self._prompts.train)} prompts, {steps}; lag {rollout.max_lag}; "
            f"{config.precision}; {device}"
        )
