"""Collector of rollouts: keeps inference engines busy while the trainer learns, on a thread with an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from megascend.apps.rl.rollout.advantages import MIN_RANGE, without_signal
from megascend.apps.rl.rollout.buffer import Counts, Dispatch, RolloutBuffer
from megascend.apps.rl.rollout.engine_pool import EnginePool
from megascend.apps.rl.rollout.episodes import Episodes
from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.apps.rl.rollout.prompts import Prompt
from megascend.errors import ConfigError, DataError, EngineError, EngineLostError
from weightwire.engine import InferenceEngine, Sampling
from weightwire.engine_calls import LoopThread

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 3
"""Attempts at a prompt before the run ends; each goes to an engine that has not failed at it, if there is one."""
LOSSES = 10
"""Engines lost while they answered one prompt, after which the run ends: the prompt may be what ends them."""
BACKOFF_S = 0.5
"""Seconds before the second attempt; doubled for each further one."""
RETURN_PAUSE_S = 0.1
"""Seconds after which :meth:`RolloutCollector.take` returns None if an engine is back and waits for weights."""
CLOSE_S = 10.0
"""Seconds that engines may take to close, before they are abandoned."""
WARNING_INTERVAL = 5
"""Batches of groups without signal between two warnings, if ``max_equal_groups`` does not end the run."""


class PromptStream(Protocol):
    """Endless stream of prompts, whose position can be saved."""

    def __next__(self) -> list[Prompt]:
        """Return a list of one prompt."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Task:
    """Settings of rollouts: episodes, sampling, and what is dropped.

    Attributes:
        decode: returns the text of token ids, for messages.
        sampling: sampling parameters of training rollouts; ``seed`` is the run's.
        drop_equal: drop groups whose rewards are all equal, and sample other prompts instead.
        max_equal_groups: number of them in a row that ends the run; half of it logs a warning; 0: no limit.
        equal_groups_have_signal: groups with equal rewards are learned from like any other, by a teacher's scores or by
            advantages that compare all groups of a step.
    """

    episodes: Episodes
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling
    group_size: int
    drop_equal: bool = True
    max_equal_groups: int = 0
    equal_groups_have_signal: bool = False

    def __post_init__(self) -> None:
        if self.sampling.temperature <= 0:
            raise ConfigError(
                f"training rollouts are sampled at a temperature above 0, not {self.sampling.temperature}: greedy responses have "
                "no probability to learn from"
            )
        if self.group_size < 2:
            raise ConfigError(f"group_size must be 2 or more to compare responses, got {self.group_size}")


@dataclass
class Attempts:
    """Attempts at a prompt that have failed.

    Attributes:
        failed: engines that have failed at it and still answer.
        losses: number of engines that were lost during them.
    """

    failed: list[int] = field(default_factory=list)
    losses: int = 0


class LostMeanwhileError(EngineLostError):
    """The engine of a prompt was lost before it answered, or there is no engine: the prompt is not at fault."""


class RolloutCollector:
    """Collector of rollouts for one trainer. All methods are called from one thread (rank 0's), :meth:`close` at the end.

    Attributes:
        pool: the engines, whose methods belong to the event loop: ``run`` runs its coroutines, ``call`` its other methods.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        prompts: PromptStream,
        buffer: RolloutBuffer,
        task: Task,
        engines_lost_s: float = 600.0,
    ) -> None:
        """
        Args:
            engines: closed by :meth:`close`. They get prompts after :meth:`updated`.
            engines_lost_s: seconds without any engine after which :meth:`take` and the pool's ``connect`` and ``require_any``
                raise EngineLostError.
        """
        if not engines:
            raise ConfigError("rollouts need at least one engine")
        self._prompts, self._buffer, self._task = prompts, buffer, task
        self._running: set[asyncio.Task[None]] = set()
        self._attempts: dict[int, Attempts] = {}  # by prompt number
        self._problem: BaseException | None = None
        self._batches_taken = self._version = self._offset = 0
        self._started = self._closing = False
        self.on_finished: Callable[[TrajectoryGroup], None] | None = None
        """Called on the event loop with each group that waits for the trainer from then on."""
        # Only the event loop's thread touches the state; the trainer's thread submits coroutines to it.
        self._changed = asyncio.Event()
        self.pool = EnginePool(engines, engines_lost_s, self._proceed)
        self._thread = LoopThread("rollouts")
        self.run, self.call = self._thread.run, self._thread.call

    # --- the trainer's side ---

    def start(self, step: int, offset: int) -> None:
        """Send the first prompts. The trainer has completed ``step`` steps, and the engines have the weights after the last one.

        Args:
            offset: an engine's version minus the trainer's. Engines count up for as long as they run, while a trainer starts at
                0 or at its last checkpoint.
        """

        def begin() -> None:
            self._batches_taken, self._version, self._offset, self._started = step, step, offset, True
            self._fill()

        self.call(begin)

    def take(self, step: int, timeout_s: float) -> list[TrajectoryGroup] | None:
        """Return the groups of the next step, or None if there are not enough within ``timeout_s``.

        Raises:
            EngineError: a prompt could not be rolled out in ``ATTEMPTS`` attempts.
            DataError: a reward function failed, or a prompt cannot be encoded.
        """
        return self.run(self._take(step, timeout_s))

    def put_back(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Record that the trainer has not learned from the groups of the last :meth:`take`, before the end of a run."""
        self.call(self._buffer.put_back, groups)

    def updated(self, version: int, engines: Sequence[InferenceEngine] | None = None) -> None:
        """Record that engines (None: all) now have the weights of ``version``, in their own count; send prompts if possible."""
        self.call(self.pool.updated, version, engines)

    def evaluate(
        self, prompts: Sequence[Prompt], temperature: float, n: int, offset: int | None = None
    ) -> Future[list[TrajectoryGroup]]:
        """Start rollouts of other prompts beside those of training; return their groups in order.

        Args:
            offset: as for :meth:`start`, before it.
        """
        if offset is not None:
            self._offset = offset
        sampling = replace(self._task.sampling, temperature=temperature)
        return self._thread.submit(self._evaluate(prompts, sampling, n))

    def counts(self) -> Counts:
        episodes = self._task.episodes
        # A copy: the event loop counts on.
        return self.call(lambda: replace(self._buffer.counts, timed_out=episodes.timed_out, failed=episodes.failed))

    def take_dropped(self) -> list[tuple[str, TrajectoryGroup]]:
        """Return the groups dropped since the last call, with the reason of each; see :meth:`RolloutBuffer.take_dropped`."""
        return self.call(self._buffer.take_dropped)

    def completed_episodes(self) -> int:
        """Return the number of episodes that have ended, including those of evaluations."""
        return self._task.episodes.completed

    def describe_wait(self) -> str:
        """Describe what the collector waits for: the user's code, with its prompt, or the engines."""
        waiting = self._task.episodes.describe_wait()
        return "no engine has answered" if waiting is None else f"{waiting}, and nothing else has arrived"

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent state of prompt stream and buffer, as JSON."""
        # Both in one call: between two of them a prompt could leave the stream and be in neither.
        return self.call(lambda: {"prompts": self._prompts.state_dict(), "buffer": self._buffer.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; before :meth:`start`."""
        assert not self._started, "load_state_dict() after start()"
        self._prompts.load_state_dict(state["prompts"])
        self._buffer.load_state_dict(state["buffer"])

    def close(self) -> None:
        """Cancel running rollouts, close the engines, and end the thread. May be called twice."""
        if self._thread.loop.is_closed():
            return
        try:
            # An engine that does not answer must not hold up the end of the run.
            self.run(asyncio.wait_for(self._close(), CLOSE_S))
        except asyncio.TimeoutError:  # must not hide the run's result or its error
            log.warning("the rollout engines did not close within %g s and are abandoned; their leases expire", CLOSE_S)
        finally:
            self._thread.close()
            self._task.episodes.close()

    # --- on the event loop ---

    async def _take(self, step: int, timeout_s: float) -> list[TrajectoryGroup] | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            if self._problem is not None:
                raise self._problem
            # Cleared before the buffer is read, so that a group that arrives in between sets it again.
            self._changed.clear()
            groups = self._buffer.take(step)
            if groups is not None:
                self._batches_taken = step + 1
            self._fill()
            if groups is not None:
                return groups
            self.pool.require_any()
            if self.pool.returned:
                # Only the caller has the weights that the engine waits for. The pause bounds its polling if it cannot give them.
                await asyncio.sleep(RETURN_PAUSE_S)
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return None

    def _fill(self) -> None:
        # Without an engine, prompts wait in the buffer.
        oldest = self.pool.oldest
        if not self._started or self._problem is not None or oldest is None:
            return
        self._version = oldest - self._offset
        for _ in range(self._buffer.room(self._batches_taken, self._version)):
            # Retries first: they are the oldest, and others wait for them with in_order.
            dispatch = self._buffer.next_retry(self._version)
            if dispatch is None:
                dispatch = self._buffer.dispatch(next(self._prompts)[0], self._version)
            task = asyncio.create_task(self._roll_out(dispatch))
            self._running.add(task)  # the event loop holds only weak references
            task.add_done_callback(self._running.discard)

    async def _roll_out(self, dispatch: Dispatch) -> None:
        number = dispatch.number
        # By prompt, not in this coroutine: a retry is a new dispatch, and must avoid the engines that failed before.
        attempts = self._attempts.setdefault(number, Attempts())
        try:
            sampling = replace(self._task.sampling, seed=_seed(self._task.sampling.seed, number))
            try:
                group = await self._roll_out_group(number, dispatch.prompt, sampling, self._task.group_size, attempts)
            except LostMeanwhileError as error:
                if attempts.losses == LOSSES:
                    raise EngineLostError(
                        f"{error}; {LOSSES} engines were lost while they answered prompt {number}"
                    ) from error
                self._buffer.failed(number)
            except EngineError:
                # A prompt that fails on every engine is at fault itself.
                if len(attempts.failed) == ATTEMPTS:
                    raise
                # Longer each time: the engine may be busy.
                await asyncio.sleep(BACKOFF_S * 2 ** (len(attempts.failed) - 1))
                self._buffer.failed(number)
            else:
                # The record of attempts is kept only as long as the prompt may be tried again.
                del self._attempts[number]
                if len(group.trajectories) < 2:  # an advantage compares at least two
                    self._buffer.discarded(number)
                else:
                    equal = not self._task.equal_groups_have_signal and without_signal(group.rewards)
                    dropped = equal and self._task.drop_equal
                    self._buffer.finished(group, equal=equal, dropped=dropped)
                    if self.on_finished is not None and not dropped:
                        self.on_finished(group)
                    if equal:
                        self._check_streak(group)
        except asyncio.CancelledError as cancellation:
            if self._closing:
                raise
            # Raised by the user's code, not by close(): without an error the prompt would silently be missing.
            problem = DataError(
                f"{self._task.episodes.name} was cancelled at prompt {number}, although the run has not ended"
            )
            problem.__cause__ = cancellation
            self._problem = self._problem or problem
        except BaseException as problem:  # noqa: BLE001  raised again by take(), on the trainer's thread
            # The first one: later ones often follow from it.
            self._problem = self._problem or problem
        # After errors, too: take() raises them.
        self._proceed()

    def _check_streak(self, group: TrajectoryGroup) -> None:
        """Warn of consecutive groups without signal, ending with ``group``; raise DataError at the limit."""
        task, streak = self._task, self._buffer.equal_streak
        limit = task.max_equal_groups if task.drop_equal else 0
        response = task.decode(group.trajectories[-1].tokens)
        all_equal = streak.largest - streak.least <= MIN_RANGE
        rewards = f"{streak.largest:g} to all of them" if all_equal else f"{streak.least:g} to {streak.largest:g}"
        description = (
            f"step {self._batches_taken + 1}: the last {streak.groups} groups have no learning signal: within each, all rewards "
            f"are equal (to {MIN_RANGE:g}); {task.episodes.name} gave the {streak.responses} responses {rewards}, "
            f"{streak.cut_off} of them were cut off at max_tokens: {task.sampling.max_tokens}; the last one is {response!r:.100}"
        )
        if limit and streak.groups >= limit:
            raise DataError(
                f"{description}; rollout.max_groups_without_signal is {limit}: check the reward function, the difficulty of the "
                "prompts and rollout.max_tokens"
            )
        # Half-way to the limit there is still time to act; without a limit the run continues, and the warning is repeated.
        warn_at = limit // 2 or WARNING_INTERVAL * self._buffer.batch
        if streak.groups == warn_at or (not limit and streak.groups % warn_at == 0):
            ending = f"the run ends after {limit} (rollout.max_groups_without_signal)" if limit else "no limit is set"
            log.warning("%s; %s", description, ending)

    async def _roll_out_group(
        self, number: int, prompt: Prompt, sampling: Sampling, n: int, attempts: Attempts
    ) -> TrajectoryGroup:
        """Run the episodes of a prompt on the least busy engine that has not failed at it, nor at others recently.

        Raises:
            LostMeanwhileError: the engine was lost, or there is none.
            EngineError: the engine failed at this prompt, which ``attempts`` records.
        """
        index = await self.pool.choose(attempts.failed)
        if index is None:
            raise LostMeanwhileError("no engine may get prompts")
        with self.pool.sampling(index, n) as engine:
            try:
                episodes = await self._task.episodes.run_each(engine, prompt, sampling, n)
            except EngineError as error:
                if await self.pool.check_failure(index):
                    attempts.losses += 1
                    raise LostMeanwhileError(str(error)) from error
                attempts.failed.append(index)
                raise
        self.pool.succeeded(index)
        # In the trainer's count, in which staleness is measured.
        renumbered = (
            replace(
                trajectory,
                first_version=trajectory.first_version - self._offset,
                last_version=trajectory.last_version - self._offset,
            )
            for trajectories in episodes
            for trajectory in trajectories
        )
        return TrajectoryGroup(number, tuple(renumbered), sum(not trajectories for trajectories in episodes))

    async def _evaluate(self, prompts: Sequence[Prompt], sampling: Sampling, n: int) -> list[TrajectoryGroup]:
        def seeded(number: int) -> Sampling:
            # From all tokens, and without routes: nothing is learned from an evaluation. Evaluations of a run draw with the same
            # numbers, so that their means differ by the weights, and with other numbers than training.
            seed = _seed(sampling.seed, -1 - number)
            return replace(sampling, seed=seed, routed_experts=False, top_p=1.0, top_k=0)

        async def group(number: int, prompt: Prompt) -> TrajectoryGroup:
            attempts = Attempts()
            while True:
                try:
                    return await self._roll_out_group(number, prompt, seeded(number), n, attempts)
                except LostMeanwhileError as error:
                    if attempts.losses == LOSSES:
                        raise EngineLostError(str(error)) from error
                    # Another engine answers, or this one when it is back.
                    await asyncio.sleep(BACKOFF_S)
                except EngineError:
                    if len(attempts.failed) == ATTEMPTS:
                        raise
                    await asyncio.sleep(BACKOFF_S * 2 ** (len(attempts.failed) - 1))

        return await asyncio.gather(*(group(number, prompt) for number, prompt in enumerate(prompts)))

    async def _close(self) -> None:
        self._closing = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        # After the tasks, which use them.
        await self.pool.close()

    def _proceed(self) -> None:
        self._changed.set()
        self._fill()


def _seed(seed: int | None, number: int) -> int | None:
    """Return the seed of one prompt's first sample, which depends only on the run's seed and the prompt's number.

    Sample i has the seed + i: vLLM counts up for the n responses of a request. Prompts of evaluations have numbers below 0.
    """
    # Multiples of about 2**31 / golden ratio lie far apart: those of any two of a million prompts by 1,700 or more. Runs with
    # neighbouring seeds share no number within a million. 31 bits fit every engine's type of seed.
    return None if seed is None else (seed * 1_000_003 + number) * 1_327_213_345 % 2**31
