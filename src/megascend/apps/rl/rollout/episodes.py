"""Episodes: what happens between a prompt and its graded trajectories. Here: one response and a reward function."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from megascend.apps.rl.rollout.group import Trajectory
from megascend.apps.rl.rollout.prompts import Prompt
from megascend.apps.rl.rollout.rewards import Reward, checked, reward_name
from megascend.errors import DataError, EngineError
from weightwire.background import BackgroundThread
from weightwire.engine import Completion, Sampling
from weightwire.errors import UnsupportedCallError

T = TypeVar("T")
log = logging.getLogger(__name__)

SLOW_S = 300.0
"""Seconds after which a call of the reward function that has not returned is reported; then after twice as many, and so on."""


class ResponseSampler(Protocol):
    """The part of an inference engine that episodes need."""

    name: str

    async def generate(self, prompt: Sequence[int], sampling: Sampling, n: int = 1) -> list[Completion]:
        """Sample ``n`` responses to a prompt of token ids."""
        ...


class Episodes(ABC):
    """A kind of episodes. Its methods run on the collector's event loop, except for :meth:`close`.

    Attributes:
        name: the reward function or the environment, for messages.
        completed: episodes that have ended, those of evaluations included.
        timed_out, failed: episodes that have ended without a trajectory: cancelled at their deadline, or by an exception.
        last_failure: description of the last of these failures.
    """

    name: str
    completed: int = 0
    timed_out: int = 0
    failed: int = 0
    last_failure: str = ""

    async def run(self, engine: ResponseSampler, prompt: Prompt, sampling: Sampling, n: int) -> list[Trajectory]:
        """Run ``n`` episodes of a prompt; return all their trajectories. See :meth:`run_each`."""
        return [trajectory for episode in await self.run_each(engine, prompt, sampling, n) for trajectory in episode]

    @abstractmethod
    async def run_each(
        self, engine: ResponseSampler, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[list[Trajectory]]:
        """Run ``n`` episodes of a prompt on an engine; return each one's trajectories, none of one that failed.

        Their versions are the engine's own.

        Raises:
            EngineError: the engine failed; another may answer.
            DataError: the prompt, the reward function or the environment is at fault.
        """

    def describe_wait(self) -> str | None:
        """Describe the longest call of the user's code that has not returned; None if there is none."""
        return None

    def close(self) -> None:  # noqa: B027  most kinds hold nothing
        """End what runs. May be called twice."""


async def sample(engine: ResponseSampler, tokens: Sequence[int], sampling: Sampling, n: int) -> list[Completion]:
    """Sample ``n`` responses, and check that the engine has returned what was requested."""
    completions = await engine.generate(tokens, sampling, n)
    # A group with fewer responses would have other advantages.
    if len(completions) != n:
        raise EngineError(f"{engine.name} gave {len(completions)} responses instead of {n}")
    for completion in completions:
        if wrong := [value for value in completion.logprobs if not math.isfinite(value)]:
            raise EngineError(
                f"{engine.name} gave a token that it sampled the log-probability {wrong[0]}: its weights or its numbers are not "
                "finite"
            )
    if sampling.routed_experts and any(completion.routed_experts is None for completion in completions):
        raise UnsupportedCallError(f"{engine.name} returned no routed experts")
    if sampling.truncates and any(completion.allowed is None for completion in completions):
        raise UnsupportedCallError(f"{engine.name} does not return which tokens top_p and top_k allowed")
    return completions


class GradedResponses(Episodes):
    """Episodes of one response, which a reward function grades on another thread: it may take seconds."""

    def __init__(
        self,
        encode: Callable[[Prompt], list[int]],
        decode: Callable[[Sequence[int]], str],
        reward: Reward,
        locate: Callable[[Prompt], str] = lambda prompt: "",
        threads: int = 8,
    ) -> None:
        """
        Args:
            encode: returns the token ids of a prompt.
            decode: returns the text of a response's token ids, for the reward function.
            reward: see :data:`megascend.apps.rl.rollout.rewards.Reward`.
            locate: returns file and line of a prompt, for messages.
        """
        self.name = f"the reward function {reward_name(reward)}"
        self._encode, self._decode, self._reward, self._locate = encode, decode, reward, locate
        self._graders = Graders(threads)

    async def run_each(
        self, engine: ResponseSampler, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[list[Trajectory]]:
        tokens = tuple(self._encode(prompt))
        completions = await sample(engine, tokens, sampling, n)

        def graded() -> list[list[Trajectory]]:
            return [
                [self._graded(tokens, completion, prompt, engine.name, sampling.temperature)]
                for completion in completions
            ]

        waiter = asyncio.wrap_future(self._graders.submit(prompt, graded))
        wait_s = SLOW_S
        try:
            while not (await asyncio.wait({waiter}, timeout=wait_s))[0]:
                wait_s *= 2
                # Other prompts keep the run going, so that nothing else would report it.
                if (seconds := self._graders.running_s(prompt)) is not None:
                    log.warning("rollouts: %s; they continue without this prompt", self._describe(prompt, seconds))
            return waiter.result()
        finally:
            waiter.cancel()  # by the end of the run
            self.completed += 1

    def _graded(
        self, tokens: tuple[int, ...], completion: Completion, prompt: Prompt, engine: str, temperature: float
    ) -> Trajectory:
        try:
            # A copy: what a reward function writes into its example is neither of the prompt nor of other responses.
            reward, parts = checked(self._reward, self._decode(completion.tokens), copy.deepcopy(prompt))
        except DataError as error:
            if source := self._locate(prompt):
                raise DataError(f"{source}: {error}") from error.__cause__
            raise
        return Trajectory(
            tokens,
            completion.tokens,
            completion.logprobs,
            reward,
            completion.finish_reason,
            completion.first_version,
            completion.last_version,
            rewards=parts,
            engine=engine,
            routed_experts=completion.routed_experts,
            temperature=temperature,
            allowed=completion.allowed,
        )

    def describe_wait(self) -> str | None:
        call = self._graders.oldest()
        if call is None:
            return None
        return self._describe(*call)

    def _describe(self, prompt: Prompt, seconds: float) -> str:
        source = self._locate(prompt)
        return f"{self.name} has not returned for {seconds:.0f} s{f' for the prompt at {source}' if source else ''}"

    def close(self) -> None:
        self._graders.close()


class Graders:
    """Daemon threads that call the reward function: one that never returns does not keep the process alive."""

    def __init__(self, threads: int) -> None:
        self._threads, self._calls = threads, queue.SimpleQueue[tuple[Prompt, Callable[[], Any], Future[Any]] | None]()
        self._started: list[BackgroundThread] = []
        self._running: dict[int, tuple[float, Prompt]] = {}  # by thread

    def submit(self, prompt: Prompt, grade: Callable[[], T]) -> Future[T]:
        """Call ``grade`` on one of the threads, which are started on demand."""
        future: Future[T] = Future()
        self._calls.put((prompt, grade, future))
        if len(self._started) < self._threads:
            # Daemons: a reward function that never returns must not keep the process alive.
            self._started.append(BackgroundThread(self._work, name="reward"))
            self._started[-1].start()
        return future

    def oldest(self) -> tuple[Prompt, float] | None:
        """Return prompt and age in seconds of the longest running call; None if no call is running."""
        # A copy: threads change it meanwhile.
        running = list(self._running.values())
        if not running:
            return None
        start, prompt = min(running, key=lambda call: call[0])
        return prompt, time.monotonic() - start

    def running_s(self, prompt: Prompt) -> float | None:
        """Return how many seconds a prompt's call has been running; None if it waits for a thread."""
        return next(
            (time.monotonic() - start for start, other in list(self._running.values()) if other is prompt), None
        )

    def close(self) -> None:
        """Cancel waiting calls, and end the threads after their current ones."""
        with contextlib.suppress(queue.Empty):
            while (call := self._calls.get_nowait()) is None or call[2].cancel():
                pass
        # One end for each thread. They are daemons: a call that does not return is left behind.
        for _ in self._started:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            prompt, grade, future = call
            # Cancelled by close() while it waited.
            if not future.set_running_or_notify_cancel():
                continue
            self._running[threading.get_ident()] = time.monotonic(), prompt
            try:
                future.set_result(grade())
            except BaseException as error:  # noqa: BLE001  raised in the waiter of the future
                future.set_exception(error)
            finally:
                del self._running[threading.get_ident()]
