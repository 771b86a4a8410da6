"""Environments: episodes of several turns, with tools, written as asynchronous Python.

An environment has one method. This one lets the model use a calculator::

    class Calculator:
        async def run(self, policy, example):
            conversation = policy.conversation([{"role": "user", "content": example["question"]}])
            while not conversation.full:
                reply = await conversation.reply()
                call = re.search(r"<calc>(.*?)</calc>", reply)
                if call is None:
                    break
                conversation.add([{"role": "tool", "content": calculate(call[1])}])
            return conversation.trajectory(reward=float(reply.strip() == example["answer"]))

The trainer learns from the tokens that the model sampled, as they were sampled: nothing is tokenized again, and what the
environment adds is context.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any, Protocol, cast

from megascend.apps.data.chat import ChatTemplate, Tools
from megascend.apps.data.messages import parse_messages
from megascend.apps.data.samples import opening_tokens
from megascend.apps.rl.rollout.advantages import LARGEST_REWARD
from megascend.apps.rl.rollout.episodes import Episodes, ResponseSampler, sample
from megascend.apps.rl.rollout.group import Trajectory
from megascend.apps.rl.rollout.prompts import Prompt
from megascend.apps.rl.rollout.rewards import as_number
from megascend.config.plugins import load_object
from megascend.config.rl import EnvironmentSettings
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.models.checkpoint_files.tokenizer import following_tokens
from weightwire.background import BackgroundThread
from weightwire.engine import Completion, RoutedExperts, Sampling
from weightwire.engine_calls import LoopThread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Message = dict[str, Any]

WINDOW = 100
"""Last episodes among which the share of failed ones is measured."""
FEWEST = 20
"""Episodes after which the share is first compared with its limit."""
CLOSE_S = 10.0
"""Seconds that running episodes have to end with the run."""
PLACEHOLDER = "replyofthemodel"
"""Stands for the model's replies where the text that a template writes after one is determined."""


class FullContextError(MegascendError):
    """A conversation has no room for another response."""


class Environment(Protocol):
    """An environment, as users write it: an object with this method.

    It may have an attribute ``examples``, a list of JSON objects, that is used if the run names no prompt file.
    """

    async def run(self, policy: Policy, example: Prompt) -> Trajectory | Sequence[Trajectory]:
        """Run one episode.

        Runs on a thread of its own for all environments, so that code that blocks delays other episodes, but no engine.

        Args:
            policy: the model that is trained; episodes of one example share an engine.
            example: a line of the prompt file.

        Returns:
            What the trainer learns from; several trajectories if the model had several contexts (agents, or a history that was
            rewritten). All trajectories of an example are compared with each other.
        """
        ...


class PromptRenderer:
    """Token ids of what an environment writes, with the model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_date: date | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, day=template_date) if tokenizer.chat_template else None

    def start(self, start: str | Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of a text, or of messages up to where the assistant replies."""
        if isinstance(start, str):
            tokens: Any = opening_tokens(start, self._tokenizer)
        else:
            text = self._render(start, tools, prompt=True)
            tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise DataError(f"the prompt has no tokens: {start!r:.80}")
        return list(tokens)

    def text(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of a sequence."""
        return following_tokens(text, self._tokenizer)

    def continuation(
        self, earlier: Sequence[Message], added: Sequence[Message], last: str, tools: Tools = None
    ) -> list[int]:
        """Return the tokens between a reply of the assistant and the next one, as the chat template writes them.

        Args:
            earlier: messages before the reply.
            added: messages after it.
            last: text of the reply's last token if that token ends a turn; empty if the reply was cut off.
        """
        # With a placeholder for the reply: what a template makes of its text (some remove reasoning), and of earlier turns, does
        # not matter, since their tokens stay as they are.
        placeholder = PLACEHOLDER
        while placeholder in str(added):
            placeholder += "x"
        rendered = self._render([*earlier, {"role": "assistant", "content": placeholder}, *added], tools, prompt=True)
        between = rendered[rendered.rindex(placeholder) + len(placeholder) :]
        # The token that ends the turn was sampled, unless the reply was cut off.
        sampled = between.index(last) + len(last) if last and between.lstrip().startswith(last) else 0
        return following_tokens(between[sampled:], self._tokenizer, placeholder + between[:sampled])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without special ones unless requested."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def save_tokenizer(self, directory: str) -> None:
        """Write the tokenizer with its chat template, for programs that render conversations themselves."""
        self._tokenizer.save_pretrained(directory)

    def _render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
        if self._template is None:
            raise DataError("messages need a chat template, and the model's tokenizer has none; begin with a text")
        parsed = parse_messages(list(messages), "messages", learned=False)[0]
        return self._template.rendering(parsed, tools, prompt=prompt).text


class Policy:
    """The model that an environment plays with, for one episode.

    Attributes:
        sampling: settings of its responses; ``max_tokens`` is the longest one.
        max_length: most tokens of a trajectory, prompt included.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[int], Sampling], Future[Completion]],
        renderer: PromptRenderer,
        sampling: Sampling,
        max_length: int,
        engine: str,
        seed_step: int = 1,
    ) -> None:
        self._generate, self._renderer, self._seed_step = generate, renderer, seed_step
        self.sampling, self.max_length, self.engine = sampling, max_length, engine
        # Kept apart from what the environment raises, which may catch it.
        self.engine_error: Exception | None = None
        self._requests = 0

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that follows others, without special tokens; a conversation begins with a text."""
        return self._renderer.text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._renderer.decode(tokens)

    def save_tokenizer(self, directory: str) -> None:
        self._renderer.save_tokenizer(directory)

    def conversation(self, start: str | Sequence[Message], tools: Tools = None) -> Conversation:
        """Begin a conversation with messages of a chat, or with a text.

        Args:
            tools: JSON schemas of functions, for the chat template.

        Raises:
            DataError: there are no tokens, or messages without a chat template.
        """
        return Conversation(self, self._renderer, start, tools)

    async def generate(self, tokens: Sequence[int], max_tokens: int | None = None) -> Completion:
        """Sample one response to token ids; the building block of conversations.

        Raises:
            FullContextError: there is no room for a response.
            EngineError: the engine failed. The episode is repeated on another one, whatever the environment does about the error.
        """
        room = self.max_length - len(tokens)
        if room < 1:
            raise FullContextError(
                f"{len(tokens)} tokens leave no room for a response: a trajectory has at most {self.max_length}"
            )
        sampling = replace(self.sampling, max_tokens=min(max_tokens or self.sampling.max_tokens, room))
        if sampling.seed is not None:
            # A seed for each response: with one for all, equal contexts would get equal responses.
            sampling = replace(sampling, seed=(sampling.seed + self._seed_step * self._requests) % 2**31)
        self._requests += 1
        try:
            return await asyncio.wrap_future(self._generate(tokens, sampling))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.engine_error = self.engine_error or error
            raise


class Conversation:
    """Turns of the model and of the environment, in one growing sequence of tokens.

    Attributes:
        replies: texts of the model's replies so far, without special tokens.
    """

    def __init__(self, policy: Policy, renderer: PromptRenderer, start: str | Sequence[Message], tools: Tools) -> None:
        self._policy, self._renderer, self._tools = policy, renderer, copy.deepcopy(tools)
        self._messages: list[Message] | None = None if isinstance(start, str) else copy.deepcopy(list(start))
        self._sequence = EpisodeTokens(policy)
        # Once: a prompt that is rendered again after a day's end, or by other options, would be another one.
        self._sequence.add_context(renderer.start(start, tools))
        self.replies: list[str] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return all token ids, prompt included."""
        return tuple(self._sequence.tokens)

    @property
    def full(self) -> bool:
        """Return whether there is no room for another reply, or the last one was cut off and cannot be continued."""
        responses = self._sequence.responses
        cut_off = bool(responses) and responses[-1].finish_reason == "length"
        return cut_off or len(self._sequence.tokens) >= self._policy.max_length

    async def reply(self, max_tokens: int | None = None) -> str:
        """Let the model reply; return the text without special tokens.

        Raises:
            FullContextError: there is no room for a reply (:attr:`full`).
            EngineError: as :meth:`Policy.generate`.
        """
        completion = await self._policy.generate(self.tokens, max_tokens)
        self._sequence.add_response(completion)
        self.replies.append(self._renderer.decode(completion.tokens))
        return self.replies[-1]

    def add(self, turn: str | Sequence[Message]) -> None:
        """Add what the environment answers: messages if the conversation began with messages, else a text.

        Raises:
            DataError: the wrong kind, no reply before it, or messages that the chat template refuses.
        """
        if isinstance(turn, str) != (self._messages is None):
            kinds = ("messages", "a text") if self._messages is None else ("a text", "messages")
            raise DataError(f"got {kinds[0]} in a conversation that began with {kinds[1]}")
        if not self._sequence.responses:
            raise DataError("add() before the first reply(): begin the conversation with all that comes before it")
        if isinstance(turn, str):
            tokens = self._renderer.text(turn)
        else:
            assert self._messages is not None
            reply = self._sequence.responses[-1]
            ending = self._renderer.decode(reply.tokens[-1:] if reply.finish_reason == "stop" else (), special=True)
            tokens = self._renderer.continuation(self._messages, turn, ending, self._tools)
            self._messages += [{"role": "assistant", "content": self.replies[-1]}, *copy.deepcopy(list(turn))]
        self._sequence.add_context(tokens)

    def trajectory(self, reward: float, rewards: Mapping[str, float] | None = None) -> Trajectory:
        """Return what the trainer learns from, up to the model's last reply.

        Args:
            rewards: parts of the reward by name, for the records; they need not sum to it.

        Raises:
            DataError: the model has not replied.
        """
        if not self._sequence.responses:
            raise DataError("trajectory() before the first reply(): there is nothing to learn from")
        return self._sequence.trajectory(reward, dict(rewards or {}))


class EpisodeTokens:
    """Context and the policy's responses in one growing sequence."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.tokens: list[int] = []
        self.responses: list[Completion] = []
        self._logprobs: list[float] = []
        self._sampled: list[bool] = []
        self._allowed: list[tuple[int, ...]] = []

    def add_context(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._sampled += [False] * len(tokens)
        self._allowed += [()] * len(tokens)

    def add_response(self, completion: Completion) -> None:
        self.tokens += completion.tokens
        self.responses.append(completion)
        self._logprobs += completion.logprobs
        self._sampled += [True] * len(completion.tokens)
        self._allowed += completion.allowed or [()] * len(completion.tokens)

    def trajectory(self, reward: float, rewards: Mapping[str, float]) -> Trajectory:
        """Return what the trainer learns from; there is a response."""
        # What was added after the last response has no effect on any sampled token.
        start, end = self._sampled.index(True), len(self._sampled) - self._sampled[::-1].index(True)
        return Trajectory(
            tuple(self.tokens[:start]),
            tuple(self.tokens[start:end]),
            tuple(self._logprobs[start:end]),
            reward,
            self.responses[-1].finish_reason,
            min(response.first_version for response in self.responses),
            max(response.last_version for response in self.responses),
            sampled=tuple(self._sampled[start:end]),
            rewards=rewards,
            turns=len(self.responses),
            engine=self._policy.engine,
            routed_experts=joined_experts([response.routed_experts for response in self.responses]),
            temperature=self._policy.sampling.temperature,
            allowed=tuple(self._allowed[start:end]) if self._policy.sampling.truncates else None,
        )


def joined_experts(turns: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """Return the experts of a sequence from those of the request of each turn, each token's from the first request that had it.

    The request that sampled a token is the one whose routing its log-probability belongs to.
    """
    if any(turn is None for turn in turns):
        return None
    import numpy as np

    rows: Any = None
    for turn in turns:
        assert turn is not None
        indices = turn.numbers()
        rows = indices if rows is None else np.concatenate([rows, indices[len(rows) :]])
    return RoutedExperts.of(rows)


class EnvironmentEpisodes(Episodes):
    """Episodes of an environment. One that raises or exceeds its time is left out of its group and counted."""

    unfinished = "has not ended"

    def __init__(
        self,
        environment: Environment,
        renderer: PromptRenderer,
        settings: EnvironmentSettings,
        max_length: int,
        locate: Callable[[Prompt], str] = lambda prompt: "",
    ) -> None:
        super().__init__(f"the environment {type(environment).__qualname__}", locate)
        self._environment, self._renderer, self._settings, self._max_length = (
            environment,
            renderer,
            settings,
            max_length,
        )
        self._thread = LoopThread("environments")
        # Over all prompts and engines: what environments use (sandboxes, services) is limited, not the engines.
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)  # True: failed

    async def run_each(
        self, engine: ResponseSampler, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[list[Trajectory]]:
        loop = asyncio.get_running_loop()

        def generate(tokens: Sequence[int], sampling: Sampling) -> Future[Completion]:
            async def completion() -> Completion:
                return (await sample(engine, tokens, sampling, 1))[0]

            # On the loop of the engines' connections; the environment waits on its own.
            return asyncio.run_coroutine_threadsafe(completion(), loop)

        async def episode(number: int) -> list[Trajectory]:
            # Response k of episode i has the seed + i + n * k: none is shared, and all are close to the prompt's.
            seed = None if sampling.seed is None else sampling.seed + number
            policy = Policy(generate, self._renderer, replace(sampling, seed=seed), self._max_length, engine.name, n)
            async with self._slots:
                result = await asyncio.wrap_future(self._thread.submit(self._episode(policy, prompt)))
            if isinstance(result, Exception):
                raise result
            return result

        episodes = [asyncio.ensure_future(episode(number)) for number in range(n)]
        try:
            return await asyncio.gather(*episodes)
        finally:
            # After an engine's failure the whole group is repeated elsewhere.
            for task in episodes:
                task.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _episode(self, policy: Policy, prompt: Prompt) -> list[Trajectory] | Exception:
        """Run one episode on the environments' thread; return no trajectory if it failed, and an error that ends its group.

        The error is not raised: if the group was cancelled meanwhile, nobody would retrieve it, and asyncio would log it.
        """
        problem: Exception | None = None
        try:
            with self._calling(prompt):
                # A copy: an environment may change its example, and what the example holds.
                result = await asyncio.wait_for(self._result(policy, copy.deepcopy(prompt)), self._settings.timeout_s)
            trajectories = self._checked(result)
        except Exception as error:  # noqa: BLE001  counted, and reported with its place
            problem, trajectories = error, []
        # Also if the environment has caught it: what it did then is no behaviour of the model.
        if policy.engine_error is not None:
            return policy.engine_error
        # After the engine's errors: these episodes are repeated, and count once.
        self.completed += 1
        self._outcomes.append(problem is not None)
        excess = None if problem is None else self._count(problem, prompt)
        return excess or trajectories

    async def _result(self, policy: Policy, example: dict[str, Any]) -> Any:
        """Run the environment; what would end this task or its loop, and not the episode alone, becomes an exception."""
        start = time.monotonic()
        try:
            return await self._environment.run(policy, example)
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error
        except asyncio.CancelledError as error:
            task: Any = asyncio.current_task()
            # Python 3.10 cannot tell; there wait_for() cancels a task of its own.
            late = time.monotonic() - start >= self._settings.timeout_s
            if task.cancelling() if hasattr(task, "cancelling") else late:
                raise
            raise RuntimeError("CancelledError, and nobody cancelled the episode") from error

    def _checked(self, result: Any) -> list[Trajectory]:
        trajectories = [result] if isinstance(result, Trajectory) else [*result] if isinstance(result, Iterable) else []
        if not trajectories or not all(isinstance(trajectory, Trajectory) for trajectory in trajectories):
            raise DataError(f"returned {result!r:.80}, not a Trajectory or several (conversation.trajectory(reward))")
        return [
            replace(
                trajectory,
                reward=_finite("reward", trajectory.reward),
                rewards={str(name): _finite(f"part {name!r}", part) for name, part in trajectory.rewards.items()},
            )
            for trajectory in trajectories
        ]

    def _count(self, problem: Exception, prompt: Prompt) -> DataError | None:
        """Count and report a failed episode; return an error if there are too many."""
        # Also one that the environment raised itself: the two cannot be told apart on Python 3.10.
        if isinstance(problem, asyncio.TimeoutError):
            self.timed_out += 1
            event = f"did not end within {self._settings.timeout_s:g} s (rollout.environment.timeout_s)"
        else:
            self.failed += 1
            event = f"raised {type(problem).__name__}: {problem}{_location(problem)}"
        line = f"{self.name} {event}{self._place(prompt)}"
        self.last_failure = line
        log.warning("%s; the episode has no trajectory", line)
        failures, count = sum(self._outcomes), len(self._outcomes)
        if count >= FEWEST and failures > self._settings.max_failed * count:
            error = DataError(
                f"{failures} of the last {count} episodes failed, more than the share {self._settings.max_failed:g} "
                f"(rollout.environment.max_failed); the last one: {line}"
            )
            error.__cause__ = problem
            return error
        return None

    def close(self) -> None:
        # On a thread: an environment that blocks must not hold up the end of the run.
        closing = BackgroundThread(self._thread.close, name="environments end")
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            log.warning("%s still runs %g s after its cancellation and is abandoned", self.name, CLOSE_S)


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Import an environment: ``package.module:name`` or ``path/to/file.py:name`` of a class, of a function, or of an object.

    Args:
        options: keyword arguments of the class, or of the function that makes the environment.
    """
    environment = load_object(name, "rollout.environment", lambda value: callable(value) or hasattr(value, "run"))
    if isinstance(environment, type) or not hasattr(environment, "run"):
        try:
            environment = environment(**options)
        except Exception as error:
            raise ConfigError(
                f"rollout.environment: {name}({', '.join(options)}) raised {type(error).__name__}: {error}{_location(error)}"
            ) from error
    elif options:
        raise ConfigError(f"rollout.environment: {name} is an object and takes no options: {', '.join(options)}")
    if not asyncio.iscoroutinefunction(getattr(environment, "run", None)):
        raise ConfigError(f"rollout.environment: {name} has no method 'async def run(self, policy, example)'")
    return cast("Environment", environment)


def _finite(name: str, value: Any) -> float:
    number = as_number(value)
    if number is None or not math.isfinite(number) or abs(number) > LARGEST_REWARD:
        raise DataError(f"returned the {name} {value!r:.60}, not a finite number of at most {LARGEST_REWARD:g}")
    return number


def _location(error: BaseException) -> str:
    """Return file and line of the user's code that raised an error, in parentheses."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "megascend/" not in frame.filename and "/asyncio/" not in frame.filename
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
