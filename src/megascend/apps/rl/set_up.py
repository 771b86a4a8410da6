"""Parts of a run of ``megascend rl``, built from its settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import xxhash

from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import SampleLimits
from megascend.apps.rl.engines import response_ends
from megascend.apps.rl.learn import objective_loss
from megascend.apps.rl.rollout import verifiers
from megascend.apps.rl.rollout.buffer import RolloutBuffer
from megascend.apps.rl.rollout.collector import PromptStream, RolloutCollector, Task
from megascend.apps.rl.rollout.environments import (
    Environment,
    EnvironmentEpisodes,
    PromptRenderer,
    load_environment,
)
from megascend.apps.rl.rollout.episodes import Episodes, GradedResponses
from megascend.apps.rl.rollout.prompts import Prompt, numbered_prompts, prompt_tokens
from megascend.apps.rl.rollout.rewards import Reward, load_reward
from megascend.config.registry import check_loss_of_responses
from megascend.config.rl import Objective, RlConfig
from megascend.engines.common.router_replay import NOTHING_TO_REPLAY
from megascend.errors import ConfigError, DataError
from weightwire.engine import InferenceEngine, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.engines.base import Engine

logger = logging.getLogger(__name__)


def make_episodes(
    config: RlConfig,
    tokenizer: PreTrainedTokenizerBase,
    grader: Reward | Environment,
    max_length: int,
    sources: Sequence[tuple[str, Prompt]] = (),
) -> Episodes:
    """Build the episodes that a run's settings describe.

    Args:
        grader: result of :func:`load_grader`.
        sources: prompts with file and line, for messages.
    """

    def locate(prompt: Prompt) -> str:
        return next((source for source, candidate in sources if candidate == prompt), "")

    settings = config.rollout.environment
    if settings is not None:
        renderer = PromptRenderer(tokenizer, config.template_date)
        return EnvironmentEpisodes(cast("Environment", grader), renderer, settings, max_length, locate)
    encode = partial(prompt_tokens, tokenizer=tokenizer, template_date=config.template_date)
    return GradedResponses(encode, partial(decode, tokenizer), cast("Reward", grader), locate)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return the text of a response as the reward function gets it, without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def make_collector(
    config: RlConfig,
    engines: Sequence[InferenceEngine],
    prompts: PromptStream,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Episodes,
) -> RolloutCollector:
    rollout = config.rollout
    task = Task(
        episodes,
        partial(decode, tokenizer),
        sampling=Sampling(
            rollout.max_tokens,
            stop_token_ids=response_ends(tokenizer, config),
            seed=config.seed,
            routed_experts=rollout.router_replay,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        ),
        group_size=rollout.group_size,
        drop_equal=config.drops_equal_groups,
        max_equal_groups=rollout.max_equal_groups,
        # Who sets drop_equal has them dropped all the same.
        equal_groups_have_signal=not config.learns_from_rewards
        or ((config.objective.compares_groups or config.teacher is not None) and not config.drops_equal_groups),
    )
    buffer = RolloutBuffer(rollout.prompts_per_step, rollout.max_lag, in_order=rollout.in_order)
    return RolloutCollector(engines, prompts, buffer, task, rollout.engines_lost_s)


def load_grader(config: RlConfig) -> Reward | Environment:
    """Import what grades responses: the reward function, or the environment."""
    settings = config.rollout.environment
    if settings is not None and settings.name.startswith(verifiers.PREFIX):
        return verifiers.load(settings.name.removeprefix(verifiers.PREFIX), settings.options)
    if settings is not None:
        return load_environment(settings.name, settings.options)
    return no_reward if config.rollout.reward is None else load_reward(config.rollout.reward)


def no_reward(response: str, example: Mapping[str, Any]) -> float:
    """Return 0: a teacher takes the place of rewards."""
    return 0.0


def check_router_replay(engine: Engine) -> None:
    """Raise ConfigError, on every rank, if the trainer cannot replay the choices of the rollout's routers."""
    if engine.router_replay is None or engine.replay_unsupported_reason is not None:
        raise ConfigError(
            f"rollout.router_replay: true, but {engine.replay_unsupported_reason or NOTHING_TO_REPLAY}; set it to false"
        )


def check_objective(objective: Objective, *, reference: bool = False) -> None:
    """Find out that ``objective.loss`` cannot learn from responses, or lacks an option that is set.

    Args:
        reference: the run has a reference model, so that samples have ``ref_logprobs``.
    """
    loss = objective_loss(objective)
    check_loss_of_responses(loss.name, reference=reference)
    if loss.reduction == "sum" and objective.average == "fixed":
        raise ConfigError(
            f"objective.average: fixed divides by a length, and loss {loss.name!r} (reduction='sum') is not divided"
        )


@dataclass(frozen=True)
class PromptData:
    """Prompts of a run.

    Attributes:
        train, held_out: prompts for training and for evaluation, with file and line.
        digest: digest of the tokens of the training prompts.
        lengths: number of tokens of each prompt; 0 for lines of which an environment makes the prompt.
    """

    train: list[tuple[str, Prompt]]
    held_out: list[tuple[str, Prompt]]
    digest: str
    lengths: list[int]


def read_and_check(
    config: RlConfig,
    tokenizer: PreTrainedTokenizerBase,
    limits: SampleLimits,
    grader: Reward | Environment,
) -> PromptData:
    """Read all prompts and check them; without a file, they are the environment's examples."""
    findings, prompts, digests, lengths = Findings(), [], [], []
    for path in (config.rollout.prompts, config.evaluation.prompts if config.evaluation is not None else None):
        numbered, digest = [], xxhash.xxh3_64()
        if path is not None:
            with findings.collecting():
                numbered = numbered_prompts(path, findings, free=config.rollout.environment is not None)
        # All lines are checked before any problem is raised, so that one attempt shows every mistake.
        for number, prompt in numbered:
            with findings.collecting():
                tokens = _check_prompt(prompt, f"{path}:{number}", config, tokenizer, limits, findings)
                digest.update(json.dumps(tokens).encode())
                if path == config.rollout.prompts:
                    lengths.append(len(tokens))
        prompts.append([(f"{path}:{number}", prompt) for number, prompt in numbered])
        digests.append(digest.hexdigest())
    findings.raise_problems("prompts")
    for line in findings.lines():
        logger.warning("prompts: %s", line)
    if config.rollout.prompts is None:
        prompts[0] = _examples(config, grader)
        lengths = [0] * len(prompts[0])
    return PromptData(prompts[0], prompts[1], digests[0], lengths)


def _examples(config: RlConfig, environment: Any) -> list[tuple[str, Prompt]]:
    settings = config.rollout.environment
    assert settings is not None
    try:
        # A copy, of the kind that a checkpoint holds.
        examples: list[Prompt] = json.loads(json.dumps(list(getattr(environment, "examples", ()))))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rollout.environment: {settings.name}.examples must be JSON objects: {error}") from error
    if not examples:
        raise ConfigError(f"rollout.prompts: {settings.name} brings no examples of its own; name a JSONL file")
    return [(f"{settings.name}, example {number}", example) for number, example in enumerate(examples)]


def _check_prompt(
    prompt: Prompt,
    source: str,
    config: RlConfig,
    tokenizer: PreTrainedTokenizerBase,
    limits: SampleLimits,
    findings: Findings,
) -> list[int]:
    """Return a prompt's tokens; DataError if there are none, or too many."""
    # An environment makes its own prompt, and may give a line any meaning.
    if config.rollout.environment is not None:
        if "prompt" not in prompt and "messages" not in prompt:
            return []
        prompt = {key: value for key, value in prompt.items() if key not in ("tools", "chat_template_kwargs")}
    max_tokens = config.rollout.max_tokens
    try:
        tokens = prompt_tokens(prompt, tokenizer, config.template_date, findings, source)
    except DataError as error:
        if str(error).startswith(f"{source}: "):  # each of several lines
            raise
        raise DataError(f"{source}: {error}") from error
    count = len(tokens)
    if count + max_tokens > limits.length:
        raise DataError(
            f"{source}: {count} tokens, and rollout.max_tokens: {max_tokens} for the response: together more than "
            f"{limits.length} ({limits.setting})"
        )
    return tokens


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Compute a fingerprint of the prompts: xxh3 over all of them, hexadecimal."""
    return xxhash.xxh3_64(json.dumps(prompts, sort_keys=True).encode()).hexdigest()
