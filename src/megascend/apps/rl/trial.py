"""Trials of a dry run of ``rl``, without weights: an episode with a canned response, and the engines' versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascend.apps.rl.engines import make_engine, response_ends
from megascend.config.registry import inference_engine
from megascend.config.rl import TRAINER, RlConfig
from megascend.errors import DataError, MegascendError
from megascend.models.checkpoint_files.tokenizer import following_tokens
from weightwire.engine import Completion, Sampling
from weightwire.errors import WireError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.rl.rollout.episodes import Episodes
    from megascend.apps.rl.rollout.prompts import Prompt

CANNED = "This is a canned response."
ENGINE_S = 10.0
"""Seconds that an engine has to tell its version."""


class CannedSampler:
    """Sampler in place of an engine: every response is the same text and a stop token, cut to the longest response."""

    name = "the canned response"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, n: int = 1) -> list[Completion]:
        # Cut like an engine's: an environment must also cope with a reply that has no stop token.
        tokens = self._tokens[: sampling.max_tokens]
        reason = "stop" if len(tokens) == len(self._tokens) else "length"
        return [Completion(tokens, (-1.0,) * len(tokens), reason, 0, 0)] * n


@dataclass(frozen=True)
class EpisodeTrial:
    """Result of an episode with a canned response.

    Attributes:
        source: file and line of the prompt.
        reward: reward of the first trajectory, with its parts by name.
        seconds: duration, which an episode with a real engine has in addition to sampling.
    """

    source: str
    turns: int
    reward: float
    rewards: Mapping[str, float]
    seconds: float


def try_episode(
    config: RlConfig, episodes: Episodes, tokenizer: PreTrainedTokenizerBase, source: str, prompt: Prompt
) -> EpisodeTrial:
    stop = response_ends(tokenizer, config)
    response = [*following_tokens(CANNED, tokenizer), stop[0]]
    sampling = Sampling(config.rollout.max_tokens, stop_token_ids=stop, seed=config.seed)
    start = time.monotonic()
    # One episode, not a group: a dry run must not wait for eight sandboxes.
    try:
        trajectories = asyncio.run(episodes.run(CannedSampler(response), prompt, sampling, 1))
    finally:
        episodes.close()
    if not trajectories:
        # In a run the reason is a warning, and the run continues with other prompts; here it is the result.
        raise DataError(f"{source}: {episodes.last_failure}; the response was {CANNED!r}")
    first = trajectories[0]
    return EpisodeTrial(source, first.turns, first.reward, first.rewards, time.monotonic() - start)


def ask_engines(config: RlConfig) -> list[str]:
    """Return a line for each engine of the run file: its version, or the reason why it is unknown."""

    async def ask(index: int, address: str) -> str:
        if not inference_engine(address).is_server:
            return f"{address}: starts with the run"

        async def state() -> str:
            # Not closed: that would release it, and a run of the same name may own it.
            engine = make_engine(config, index, address)
            version, receivers = await asyncio.gather(engine.version(), engine.receivers())
            return f"version {version}, {receivers} receiver{'s' * (receivers != 1)} of weights"

        return f"{address}: {await answer_or_warning(state())}"

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*(ask(index, address) for index, address in enumerate(config.engines))))

    if config.rollout.controller is not None:
        # A question would claim its engines.
        return [f"those of the controller {config.rollout.controller}: not asked"]
    return asyncio.run(ask_all())


def describe_teacher(config: RlConfig) -> str | None:
    """Describe the teacher, and whether its server answers; None without one."""
    settings = config.teacher
    if settings is None:
        return None
    if settings.model is not None:
        location = "on the trainer's ranks" if settings.engine == TRAINER else "starts with the run"
        return f"{settings.model}: {settings.loss}; {location}"
    from megascend.apps.rl.teacher import teacher_engine

    async def ask() -> str:
        # The same request as the run's first one. Not closed, since it claims no teacher.
        await teacher_engine(config, settings).logprobs([0, 0])
        return "answers"

    return f"{settings.engine}: {settings.loss}; {asyncio.run(answer_or_warning(ask()))}"


async def answer_or_warning(answer: Awaitable[str]) -> str:
    """Await what an engine says about itself; return a warning if it fails, or says nothing for :data:`ENGINE_S`."""
    try:
        return await asyncio.wait_for(answer, ENGINE_S)
    except asyncio.TimeoutError:
        return f"warning: no answer within {ENGINE_S:g} s"
    except (MegascendError, WireError) as error:
        return f"warning: {error}"
