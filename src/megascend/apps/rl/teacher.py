"""On-policy distillation: a teacher's distributions at sampled tokens, as advantages or as targets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.apps.rl.rollouts import SLICE_S
from megascend.apps.train.teacher_model import TeacherModel, check_teacher_model, check_vocabulary
from megascend.config.rl import SGLANG, TRAINER, RlConfig, TeacherSettings
from megascend.errors import EngineError, EngineLostError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.training.batch.candidates import Candidates, allowed_rows
from megascend.training.batch.loss import Loss
from megascend.training.batch.losses import BUILT_IN
from megascend.training.batch.sample import Sample
from weightwire.engine_calls import LoopThread
from weightwire.errors import WireError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.rl.rollout.engines.sglang import SglangTeacher
    from megascend.backend import Backend
    from weightwire.engine import InferenceEngine

logger = logging.getLogger(__name__)
CONCURRENCY = 64
"""Trajectories that the teacher is asked about at a time."""
RETRY_S = 5.0
"""Seconds after which a teacher that was lost is asked again."""
Row = tuple[Tensor, Candidates | None]
"""A teacher's log-probabilities and candidates of all tokens of a sequence but the first."""


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's scores of a batch's trajectories, in the order of groups and trajectories.

    Attributes:
        settings: settings of the teacher, with the loss that learns from the scores.
        logprobs: float32 [tokens], log-probabilities of the tokens after each prompt.
        candidates: candidates for these tokens; None for the loss ``policy``, and with ``states``.
        states: the teacher's hidden states [targets, h] of the trajectories of this data parallel rank, by number.
        vocabulary_loss: the divergence over the whole vocabulary; with ``states``.
    """

    settings: TeacherSettings
    logprobs: list[Tensor]
    candidates: list[Candidates] | None
    states: Mapping[int, Tensor] | None = None
    vocabulary_loss: Loss | None = None

    def add_to(self, samples: Sequence[Sample]) -> list[Sample]:
        """Set the samples' candidates, or their advantages to those of the teacher: -(log p_engine - log p_teacher).

        That is the policy gradient of the reverse divergence KL(model || teacher) with each token's own term as its reward.
        """
        for index, (sample, logprobs) in enumerate(zip(samples, self.logprobs, strict=True)):
            prompt = len(sample) - len(logprobs)  # targets in the prompt
            if self.states is not None:
                sample.teacher_states = self.states.get(index)
                continue
            if self.candidates is not None:
                response = self.candidates[index]
                width = response.ids.shape[1]
                sample.candidates = Candidates(
                    torch.cat([torch.full((prompt, width), -1, dtype=torch.int32), response.ids]),
                    torch.cat([torch.zeros(prompt, width), response.logprobs]),
                )
                continue
            divergence = sample.old_logprobs - torch.cat([torch.zeros(prompt), logprobs])
            earned = sample.advantages if self.settings.rewards else torch.zeros(len(sample))
            advantages = earned - self.settings.coefficient * divergence
            sample.advantages = torch.where(sample.weights > 0, advantages, 0.0)
        return list(samples)

    def loss(self, policy: Loss) -> Loss:
        """Return the loss of the step.

        Args:
            policy: loss by policy gradient, for ``teacher.loss: policy``.
        """
        if self.vocabulary_loss is not None:
            return self.vocabulary_loss
        if self.candidates is None:
            return policy
        loss = BUILT_IN[self.settings.loss]
        return loss.with_settings(beta=self.settings.beta) if self.settings.loss == "jsd" else loss

    def divergence(self, groups: Sequence[TrajectoryGroup]) -> float:
        """Return the mean of log p_engine - log p_teacher over all sampled tokens: an estimate of KL(model || teacher)."""
        total, count = 0.0, 0
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for trajectory, logprobs in zip(trajectories, self.logprobs, strict=True):
            sampled = torch.tensor(trajectory.mask)
            difference = torch.tensor(trajectory.logprobs, dtype=torch.float64) - logprobs.double()
            total += float(difference[sampled].sum())
            count += int(sampled.sum())
        return total / count


class TrainerTeacher:
    """The teacher of a run on the trainer's ranks. All methods are collective."""

    def __init__(self, backend: Backend, settings: TeacherSettings, model: TeacherModel) -> None:
        self._backend, self._settings, self._model = backend, settings, model

    def scores(self, groups: Sequence[TrajectoryGroup]) -> TeacherScores:
        """Return the teacher's scores of all trajectories, and on each rank hidden states of its share."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        # At the temperature, and over the tokens, that the model's own log-probabilities are of: advantages compare the two.
        samples = [_sample(trajectory) for trajectory in trajectories]
        # The share that a step gives to this rank: it depends on lengths only.
        numbers, shard = {id(sample): number for number, sample in enumerate(samples)}, self._backend.shard(samples)
        settings = self._settings
        answers = self._model.outputs(shard, states=settings.loss != "policy")
        outputs = dict(zip((numbers[id(sample)] for sample in shard), answers, strict=True))
        local = {
            number: output.logprobs[len(trajectories[number].prompt_tokens) - 1 :] for number, output in outputs.items()
        }
        rows = {number: part for parts in self._backend.gather_by_data_rank(local) for number, part in parts.items()}
        logprobs = [rows[number] for number in range(len(samples))]
        check_possible(logprobs, trajectories, f"teacher.model: {settings.model}")
        if settings.loss == "policy":
            return TeacherScores(settings, logprobs, None)
        states = {number: output.states for number, output in outputs.items() if output.states is not None}
        return TeacherScores(settings, logprobs, None, states, self._model.loss(settings.loss, settings.beta))


class Teacher:
    """The teacher of a run. Rank 0 asks its engine; :meth:`scores` and :meth:`check` are collective.

    Args:
        engine: None on all ranks but rank 0.
        max_lag: steps after which a group that was sampled is not learned from.
        lost_s: seconds for which a teacher that is lost is asked again; a local one that has ended is started again.
    """

    def __init__(
        self,
        backend: Backend,
        settings: TeacherSettings,
        engine: InferenceEngine | SglangTeacher | None,
        max_lag: int,
        lost_s: float = 0.0,
    ) -> None:
        self._backend, self._settings, self._engine, self._max_lag = backend, settings, engine, max_lag
        self._lost_s, self._lost_since, self._reviving = lost_s, math.nan, asyncio.Lock()
        self._loop = None if engine is None else LoopThread("teacher")
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._requests: dict[int, tuple[TrajectoryGroup, list[Future[Row]]]] = {}  # by the group's number

    def close(self) -> None:
        if self._loop is not None and self._engine is not None:
            # A server that has ended holds nothing of this run.
            with contextlib.suppress(EngineError, WireError):
                self._loop.run(self._engine.close())
            self._loop.close()

    def check(self) -> None:
        """Request a sequence of two tokens, to detect a teacher that does not answer before the first rollout."""

        def ask() -> list[Future[Row]]:
            assert self._loop is not None
            return [self._loop.submit(self._ask([0, 0]))]

        self._collect(ask)

    def ask_ahead(self, group: TrajectoryGroup) -> None:
        """Request the scores of a group's trajectories in advance, while the trainer is in a step. On rank 0."""
        assert self._loop is not None
        rows = [self._loop.submit(self._ask(all_tokens(trajectory))) for trajectory in group.trajectories]
        self._requests[group.number] = group, rows

    def scores(
        self, groups: Sequence[TrajectoryGroup], stop: Callable[[], bool] = lambda: False
    ) -> TeacherScores | None:
        """Return the teacher's scores of all trajectories, on every rank; those of :meth:`ask_ahead` are waited for.

        Args:
            stop: returns True once this rank has received a signal; None is returned if one stops any rank while they wait.

        Raises:
            EngineError: the teacher failed, was lost for too long, did not answer in time, or gave a sampled token the
                probability 0.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rows = self._collect(lambda: self._futures(groups), stop)
        if rows is None:
            return None
        logprobs = [_response(part, trajectory) for (part, _), trajectory in zip(rows, trajectories, strict=True)]
        check_possible(logprobs, trajectories, f"teacher.engine: {self._settings.engine}")
        candidates = None
        if self._settings.loss != "policy":
            candidates = [
                Candidates(_response(top.ids, trajectory), _response(top.logprobs, trajectory))
                for (_, top), trajectory in zip(rows, trajectories, strict=True)
                if top is not None
            ]
        return TeacherScores(self._settings, logprobs, candidates)

    def _futures(self, groups: Sequence[TrajectoryGroup]) -> list[Future[Row]]:
        """Return the requests about the groups' trajectories, and forget those about groups that are too old. On rank 0."""
        futures: list[Future[Row]] = []
        for group in groups:
            entry = self._requests.get(group.number)
            if entry is None or list(map(all_tokens, entry[0].trajectories)) != list(
                map(all_tokens, group.trajectories)
            ):
                # A group of a checkpoint: it arrived before this process began, so it was not asked about.
                self.ask_ahead(group)
            futures += self._requests.pop(group.number)[1]
        newest = max(group.version for group in groups)
        for number, (group, late) in list(self._requests.items()):
            if group.version + self._max_lag < newest:
                del self._requests[number]
                for future in late:
                    future.cancel()
        return futures

    def _collect(
        self, ask: Callable[[], list[Future[Row]]], stop: Callable[[], bool] = lambda: False
    ) -> list[Row] | None:
        """Return on every rank the teacher's log-probabilities and candidates of all tokens but each sequence's first.

        Args:
            ask: returns the requests, on rank 0.
            stop: as of :meth:`scores`.
        """
        pending: list[Future[Row]] = []
        rows: list[Row] = []
        # The others wait in a collective, whose deadline a slow teacher must not reach.
        slice_s = min(SLICE_S, self._backend.groups.timeout_s / 4)

        def wait() -> list[Row] | None:
            if not pending:
                pending.extend(ask())
            end = time.monotonic() + slice_s
            while len(rows) < len(pending):
                future = pending[len(rows)]
                try:
                    rows.append(future.result(max(0.0, end - time.monotonic())))
                except NotYet:
                    if future.done():  # the engine's own timeout, of the same class as that of this wait
                        raise
                    return None
            return rows

        with self._backend.groups.monitor.phase("teacher"):
            while (answer := self._backend.from_rank_0(wait)) is None:
                if self._backend.any_rank(stop())[0]:
                    return None
        return answer

    async def _ask(self, tokens: list[int]) -> Row:
        async with self._slots:
            while True:
                try:
                    row = await self._request(tokens)
                except EngineLostError as error:
                    await self._wait_for_return(error)
                else:
                    self._lost_since = math.nan
                    return row

    async def _request(self, tokens: list[int]) -> Row:
        assert self._engine is not None
        if self._settings.loss == "policy":
            return torch.tensor(await self._engine.logprobs(tokens), dtype=torch.float32), None
        top = await self._engine.top_logprobs(tokens, self._settings.top)
        return torch.tensor(top.logprobs, dtype=torch.float32), Candidates.from_rows(top.ids, top.top_logprobs)

    async def _wait_for_return(self, error: EngineLostError) -> None:
        """Start the teacher again if this run has started it, and wait a moment; raise ``error`` after too long."""
        assert self._engine is not None
        now = time.monotonic()
        if math.isnan(self._lost_since):
            self._lost_since = now
            logger.warning(
                "%s; the teacher is asked again for up to %g s (rollout.engines_lost_s)", error, self._lost_s
            )
        if now - self._lost_since >= self._lost_s:
            raise EngineLostError(
                f"the teacher has not answered for {self._lost_s:g} s (rollout.engines_lost_s): {error}"
            ) from error
        async with self._reviving:  # once, for all requests that were lost with it
            started = await self._engine.revive()
        if not started:
            await asyncio.sleep(min(RETRY_S, self._lost_s))


def all_tokens(trajectory: Trajectory) -> list[int]:
    return [*trajectory.prompt_tokens, *trajectory.tokens]


def _sample(trajectory: Trajectory) -> Sample:
    sample = Sample.causal(all_tokens(trajectory), len(trajectory.prompt_tokens))
    sample.temperature = trajectory.temperature
    if trajectory.allowed is not None:
        sample.allowed = allowed_rows(len(trajectory.prompt_tokens) - 1, trajectory.allowed)
    return sample


def check_possible(logprobs: Sequence[Tensor], trajectories: Sequence[Trajectory], teacher: str) -> None:
    for trajectory, part in zip(trajectories, logprobs, strict=True):
        if not bool(part[torch.tensor(trajectory.mask)].isfinite().all()):
            raise EngineError(f"{teacher} gave a sampled token a probability of 0")


def _response(values: Any, trajectory: Trajectory) -> Tensor:
    """Return the rows of the tokens after the prompt, of values [prompt + tokens - 1, ...]."""
    expected = len(trajectory.prompt_tokens) + len(trajectory.tokens) - 1
    if len(values) != expected:
        raise EngineError(f"the teacher returned log-probabilities of {len(values)} tokens instead of {expected}")
    return values[len(trajectory.prompt_tokens) - 1 :]


def make_teacher(config: RlConfig, backend: Backend, *, main_rank: bool) -> Teacher | None:
    """Build the client of the teacher's engine that the settings name; None without one. Collective."""
    settings = config.teacher
    if settings is None or settings.engine == TRAINER:
        return None
    engines: list[InferenceEngine | SglangTeacher] = []
    backend.from_rank_0(lambda: engines.append(teacher_engine(config, settings)))
    engine, rollout = engines[0] if main_rank else None, config.rollout
    return Teacher(backend, settings, engine, rollout.max_lag, rollout.engines_lost_s)


def check_teacher(config: RlConfig, info: ModelInfo, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the teacher's directory has the model's vocabulary, and that the trainer can hold it. Local."""
    settings = config.teacher
    if settings is None or settings.model is None:
        return
    if settings.engine == TRAINER:
        check_teacher_model(config, settings.model, "teacher.model", info, tokenizer)
    else:
        check_vocabulary(settings.model, "teacher.model", tokenizer)


def teacher_engine(config: RlConfig, settings: TeacherSettings) -> InferenceEngine | SglangTeacher:
    timeout_s = config.rollout.timeout_s
    if settings.model is not None:
        from megascend.apps.rl.rollout.engines.local import LocalEngine

        return LocalEngine(settings.model, name="the teacher", timeout_s=timeout_s, precision=config.precision)
    if settings.engine.startswith(SGLANG):
        from megascend.apps.rl.rollout.engines.sglang import SglangTeacher

        return SglangTeacher(settings.engine.removeprefix(SGLANG), timeout_s=timeout_s)
    from megascend.apps.rl.rollout.engines.vllm import VllmEngine

    return VllmEngine(settings.engine, generate_timeout_s=timeout_s)
