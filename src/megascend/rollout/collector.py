"""Keeps inference engines at work while the trainer learns: prompts out, graded groups in, on a thread with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from megascend.errors import ConfigError, DataError, EngineError
from megascend.rollout.advantages import LEAST_RANGE, without_signal
from megascend.rollout.availability import Availability
from megascend.rollout.buffer import Counts, Dispatch, RolloutBuffer
from megascend.rollout.group import Group, Response
from megascend.rollout.prompts import Prompt
from megascend.rollout.rewards import Reward, checked, reward_name
from weightwire.engine import Completion, InferenceEngine, Sampling
from weightwire.engine_calls import LoopThread

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 3
"""How often a prompt is sent before the run ends: to engines that have not failed at it, as long as there are any."""
BACKOFF_S = 0.5
"""Wait before the second attempt; twice as long before each further one."""
CLOSE_S = 10.0
WARNED_BATCHES = 5
"""Where no number of groups without signal ends a run, every so many batches of them are warned of."""


class PromptStream(Protocol):
    """Prompts without end, whose position can be saved."""

    def __next__(self) -> list[Prompt]:
        """A list of one prompt."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Task:
    """What is asked of engines, and how answers are graded.

    Attributes:
        encode: token ids of a prompt.
        decode: the text of a response's token ids, as the reward function sees it.
        reward: see :data:`megascend.rollout.rewards.Reward`.
        sampling: of training rollouts, at temperature 1; ``seed`` is the run's.
        group_size: responses to one prompt.
        drop_equal: groups whose rewards are all equal are dropped, and other prompts sampled instead.
        most_equal: so many of them in a row end the run, and half as many are warned of; 0: no number does.
        locate: file and line of a prompt, for messages.
    """

    encode: Callable[[Prompt], list[int]]
    decode: Callable[[Sequence[int]], str]
    reward: Reward
    sampling: Sampling
    group_size: int
    drop_equal: bool = True
    most_equal: int = 0
    locate: Callable[[Prompt], str] = lambda prompt: ""

    def __post_init__(self) -> None:
        if self.sampling.temperature != 1:
            raise ConfigError(
                f"training rollouts are sampled at temperature 1, not {self.sampling.temperature}: at another one the engine "
                "would sample from a policy that is not the one trained"
            )
        if self.group_size < 2:
            raise ConfigError(f"group_size must be 2 or more to compare responses, got {self.group_size}")


class RolloutCollector:
    """Rollouts for one trainer. Its methods are called from one thread (rank 0's), and :meth:`close` in the end."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        prompts: PromptStream,
        buffer: RolloutBuffer,
        task: Task,
        *,
        reward_threads: int = 8,
    ) -> None:
        """
        Args:
            engines: closed with the collector.
        """
        if not engines:
            raise ConfigError("rollouts need at least one engine")
        self._engines, self._prompts, self._buffer, self._task = tuple(engines), prompts, buffer, task
        self._load, self._availability = [0] * len(engines), Availability(len(engines))
        self._running: set[asyncio.Task[None]] = set()
        self._failed: dict[int, list[int]] = {}  # prompt -> engines that have failed at it
        self._problem: BaseException | None = None
        self._taken = self._version = self._offset = 0
        self._started = False
        self._graders = Graders(reward_threads)
        self._changed = asyncio.Event()
        self._thread = LoopThread("rollouts")
        self._run = self._thread.run

    # --- the trainer's side ---

    def engine_versions(self) -> list[int]:
        """What each engine says that it has, by its own count."""

        async def ask() -> list[int]:
            return list(await asyncio.gather(*(engine.version() for engine in self._engines)))

        return self._run(ask())

    def start(self, step: int, offset: int) -> None:
        """Send the first prompts. The trainer has done ``step`` steps, and the engines have the weights after the last of them.

        Args:
            offset: what engines call a version, less what the trainer calls it. Engines count up for as long as they live, a
                trainer begins anew, or at its last checkpoint.
        """

        async def begin() -> None:
            self._taken, self._version, self._offset, self._started = step, step, offset, True
            self._fill()

        self._run(begin())

    def take(self, step: int, timeout_s: float) -> list[Group] | None:
        """The groups of the next step, or None if there are not enough within ``timeout_s``.

        Args:
            step: steps that the trainer has done.

        Raises:
            EngineError: a prompt could not be rolled out in ``ATTEMPTS`` attempts.
            DataError: a reward function failed, or a prompt cannot be encoded.
        """
        return self._run(self._take(step, timeout_s))

    def updated(self, version: int) -> None:
        """The engines have the weights after step ``version`` now: there may be room for more prompts."""

        async def note() -> None:
            self._version = version
            self._fill()

        self._run(note())

    def evaluate(self, prompts: Sequence[Prompt], temperature: float, n: int) -> Future[list[Group]]:
        """Start to roll out other prompts beside those of training; groups in their order."""
        sampling = replace(self._task.sampling, temperature=temperature)
        return self._thread.submit(self._evaluate(prompts, sampling, n))

    def counts(self) -> Counts:
        """What became of the prompts so far."""

        async def copy() -> Counts:
            return replace(self._buffer.counts)

        return self._run(copy())

    def graded(self) -> int:
        """Return how many groups have been graded, those of evaluations included."""
        return self._graders.done

    def hold_up(self) -> str:
        """Say whose answer is missing: a reward function's that has not returned, with its prompt, or else the engines'."""
        call = self._graders.oldest()
        if call is None:
            return "no engine has answered"
        prompt, seconds = call
        source = self._task.locate(prompt)
        return (
            f"the reward function {reward_name(self._task.reward)} has not returned for {seconds:.0f} s"
            f"{f' for the prompt at {source}' if source else ''}, and nothing else has arrived"
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the prompts stand and what is in the buffer, of one moment; JSON."""

        async def state() -> dict[str, Any]:
            return {"prompts": self._prompts.state_dict(), "buffer": self._buffer.state_dict()}

        return self._run(state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; before :meth:`start`.

        Raises:
            DataError: the prompts are not those that it was taken with.
        """
        assert not self._started, "load_state_dict() after start()"
        self._prompts.load_state_dict(state["prompts"])
        self._buffer.load_state_dict(state["buffer"])

    def close(self) -> None:
        """Give up what is under way, close the engines, and end the thread. May be called twice."""
        if self._thread.loop.is_closed():
            return
        try:
            self._run(asyncio.wait_for(self._close(), CLOSE_S))
        except asyncio.TimeoutError:  # the run's own end, or its error, counts
            log.warning("the rollout engines did not close within %g s and are left; their leases end", CLOSE_S)
        finally:
            self._thread.close()
            self._graders.close()

    # --- on the event loop ---

    async def _take(self, step: int, timeout_s: float) -> list[Group] | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            if self._problem is not None:
                raise self._problem
            self._changed.clear()
            groups = self._buffer.take(step)
            if groups is not None:
                self._taken = step + 1
            self._fill()
            if groups is not None:
                return groups
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return None

    def _fill(self) -> None:
        """Dispatch as many prompts as there is room for."""
        if not self._started or self._problem is not None:
            return
        for _ in range(self._buffer.room(self._taken, self._version)):
            dispatch = self._buffer.returned(self._version)
            if dispatch is None:
                dispatch = self._buffer.dispatch(next(self._prompts)[0], self._version)
            task = asyncio.create_task(self._roll_out(dispatch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _roll_out(self, dispatch: Dispatch) -> None:
        """One prompt, to a graded group in the buffer."""
        number = dispatch.number
        failed = self._failed.setdefault(number, [])
        try:
            sampling = replace(self._task.sampling, seed=_seed(self._task.sampling.seed, number))
            try:
                group = await self._group(number, dispatch.prompt, sampling, self._task.group_size, failed)
            except EngineError:
                if len(failed) == ATTEMPTS:
                    raise
                await asyncio.sleep(BACKOFF_S * 2 ** (len(failed) - 1))
                self._buffer.failed(number)
            else:
                del self._failed[number]
                equal = without_signal(group.rewards)
                self._buffer.finished(group, equal=equal, dropped=equal and self._task.drop_equal)
                if equal:
                    self._judge_streak(group)
        except asyncio.CancelledError:
            raise
        except BaseException as problem:  # noqa: BLE001  raised again by take(), on the trainer's thread
            self._problem = self._problem or problem
        self._changed.set()
        self._fill()

    def _judge_streak(self, group: Group) -> None:
        """Warn of groups in a row that teach nothing, the last of which is ``group``; raise when there are as many as the bound.

        Raises:
            DataError: the bound is reached.
        """
        task, streak = self._task, self._buffer.equal_streak
        bound = task.most_equal if task.drop_equal else 0
        last = task.decode(group.responses[-1].tokens)
        same = streak.most - streak.least <= LEAST_RANGE
        given = f"{streak.most:g} to all of them" if same else f"{streak.least:g} to {streak.most:g}"
        what = (
            f"step {self._taken + 1}: the last {streak.groups} groups have no learning signal: within each, all rewards are "
            f"equal (to {LEAST_RANGE:g}); {reward_name(task.reward)} gave the {streak.responses} responses {given}, "
            f"{streak.cut_off} of them were cut off at max_tokens: {task.sampling.max_tokens}; the last one is {last!r:.100}"
        )
        if bound and streak.groups >= bound:
            raise DataError(
                f"{what}. Nothing can be learned from them: see whether the function grades such a response as it should, "
                "whether prompts are too hard, or learned already, and whether responses are long enough "
                f"(rollout.max_tokens). rollout.max_groups_without_signal ({bound}) sets how many in a row end a run; 0: none"
            )
        first = bound // 2 or WARNED_BATCHES * self._buffer.batch
        if streak.groups == first or (not bound and streak.groups % first == 0):
            ending = f"the run ends after {bound} (rollout.max_groups_without_signal)" if bound else "no bound is set"
            log.warning("%s; %s", what, ending)

    async def _group(
        self, number: int, prompt: Prompt, sampling: Sampling, n: int, failed: list[int] | None = None
    ) -> Group:
        """From the engine with the least work that is not in ``failed``, and has not failed at others a short time ago.

        It is added to ``failed`` if it fails, too.
        """
        tokens = self._task.encode(prompt)
        failed = [] if failed is None else failed
        others = [one for one in range(len(self._engines)) if one not in failed]
        which = self._availability.best(others or range(len(self._engines)), self._load)
        self._load[which] += n
        try:
            completions = await self._engines[which].generate(tokens, sampling, n)
            if len(completions) != n:
                raise EngineError(f"{self._engines[which].name} gave {len(completions)} responses instead of {n}")
        except EngineError:
            failed.append(which)
            self._availability.failed(which)
            raise
        finally:
            self._load[which] -= n
        self._availability.answered(which)
        responses = await asyncio.wrap_future(self._graders.submit(prompt, lambda: self._grade(prompt, completions)))
        return Group(number, tuple(tokens), responses)

    def _grade(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Response, ...]:
        def graded(one: Completion) -> Response:
            versions = one.first_version - self._offset, one.last_version - self._offset
            reward = self._reward(self._task.decode(one.tokens), prompt)
            return Response(one.tokens, one.logprobs, reward, one.finish_reason, *versions)

        return tuple(graded(one) for one in completions)

    def _reward(self, response: str, prompt: Prompt) -> float:
        try:
            return checked(self._task.reward, response, prompt)
        except DataError as error:
            if source := self._task.locate(prompt):
                raise DataError(f"{source}: {error}") from error.__cause__
            raise

    async def _evaluate(self, prompts: Sequence[Prompt], sampling: Sampling, n: int) -> list[Group]:
        def of(number: int) -> Sampling:
            return replace(sampling, seed=_seed(sampling.seed, number))

        return list(await asyncio.gather(*(self._group(i, prompt, of(i), n) for i, prompt in enumerate(prompts))))

    async def _close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines))


class Graders:
    """Threads that call the reward function. Nobody waits for them at the end: one that never returns keeps no process alive.

    Attributes:
        done: calls that have ended.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._calls = threads, queue.SimpleQueue[tuple[Prompt, Callable[[], Any], Future[Any]] | None]()
        self._started: list[threading.Thread] = []
        self._running: dict[int, tuple[float, Prompt]] = {}  # by thread
        self.done = 0

    def submit(self, prompt: Prompt, grade: Callable[[], T]) -> Future[T]:
        """Call ``grade`` on one of the threads."""
        future: Future[T] = Future()
        self._calls.put((prompt, grade, future))
        if len(self._started) < self._threads:
            self._started.append(threading.Thread(target=self._work, name="reward", daemon=True))
            self._started[-1].start()
        return future

    def oldest(self) -> tuple[Prompt, float] | None:
        """Return the prompt of the call that runs longest, and for how many seconds; None if there is none."""
        running = list(self._running.values())
        if not running:
            return None
        begun, prompt = min(running, key=lambda call: call[0])
        return prompt, time.monotonic() - begun

    def close(self) -> None:
        """Have the threads end after what they do now."""
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is None or call[2].cancel():
                pass
        for _ in self._started:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            prompt, grade, future = call
            if not future.set_running_or_notify_cancel():
                continue
            self._running[threading.get_ident()] = time.monotonic(), prompt
            try:
                future.set_result(grade())
            except BaseException as error:  # noqa: BLE001  raised again by whoever waits for the future
                future.set_exception(error)
            finally:
                del self._running[threading.get_ident()]
                self.done += 1


def _seed(seed: int | None, number: int) -> int | None:
    """Of one prompt's samples: the same for the same run and prompt, whatever else is sampled."""
    return None if seed is None else (seed * 1_000_003 + number) % 2**31
