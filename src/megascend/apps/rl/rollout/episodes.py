"""Episodes: what happens between a prompt and its graded trajectories. Here: one response and a reward function."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from megascend.apps.rl.rollout.group import Trajectory
from megascend.apps.rl.rollout.prompts import Prompt
from megascend.apps.rl.rollout.rewards import Reward, checked, reward_name
from megascend.errors import DataError, EngineError
from weightwire.background import BackgroundThread
from weightwire.engine import Completion, Sampling
from weightwire.errors import UnsupportedCallError

T = TypeVar("T")
log = logging.getLogger(__name__)

THREADS = 8
"""Prompts whose responses are graded at a time."""
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

    completed: int = 0
    timed_out: int = 0
    failed: int = 0
    last_failure: str = ""
    unfinished = "has not returned"
    """What a message says about a call of the user's code that takes long."""

    def __init__(self, name: str, locate: Callable[[Prompt], str]) -> None:
        """
        Args:
            locate: returns file and line of a prompt, for messages; may be empty.
        """
        self.name, self._locate = name, locate
        self._running: dict[int, tuple[float, Prompt]] = {}  # calls of the user's code, with the time of their start

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

    @contextlib.contextmanager
    def _calling(self, prompt: Prompt) -> Iterator[None]:
        """Note that the user's code runs for a prompt within the context."""
        call = time.monotonic(), prompt
        # By identity: several calls may begin at one moment, for one prompt.
        self._running[id(call)] = call
        try:
            yield
        finally:
            del self._running[id(call)]

    def describe_wait(self) -> str | None:
        """Describe the longest call of the user's code that has not returned; None if there is none."""
        running = list(self._running.values())  # a copy: other threads change it
        return self._describe(*min(running, key=lambda call: call[0])) if running else None

    def _describe(self, start: float, prompt: Prompt) -> str:
        return f"{self.name} {self.unfinished} for {time.monotonic() - start:.0f} s{self._place(prompt)}"

    def _place(self, prompt: Prompt) -> str:
        """Return file and line of a prompt as the end of a message; empty if they are unknown."""
        source = self._locate(prompt)
        return f" for the prompt at {source}" if source else ""

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
    ) -> None:
        """
        Args:
            encode: returns the token ids of a prompt.
            decode: returns the text of a response's token ids, for the reward function.
            reward: see :data:`megascend.apps.rl.rollout.rewards.Reward`.
        """
        super().__init__(f"the reward function {reward_name(reward)}", locate)
        self._encode, self._decode, self._reward = encode, decode, reward
        self._slots = asyncio.Semaphore(THREADS)

    async def run_each(
        self, engine: ResponseSampler, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[list[Trajectory]]:
        tokens = tuple(self._encode(prompt))
        completions = await sample(engine, tokens, sampling, n)

        def graded() -> list[list[Trajectory]]:
            with self._calling(prompt):
                return [
                    [self._graded(tokens, completion, prompt, engine.name, sampling.temperature)]
                    for completion in completions
                ]

        try:
            async with self._slots:
                start, wait_s = time.monotonic(), SLOW_S
                waiter = asyncio.wrap_future(on_daemon_thread(graded))
                try:
                    while not (await asyncio.wait({waiter}, timeout=wait_s))[0]:
                        wait_s *= 2
                        # Other prompts keep the run going, so that nothing else would report it.
                        log.warning("rollouts: %s; they continue without this prompt", self._describe(start, prompt))
                    return waiter.result()
                finally:
                    waiter.cancel()  # by the end of the run
        finally:
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


def on_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Call a function on a thread of its own; one that never returns does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # cannot be cancelled: its result is dropped if nobody waits any more
    BackgroundThread(lambda: future.set_result(work()), name="reward", on_error=future.set_exception).start()
    return future
