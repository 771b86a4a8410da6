"""What a run of ``megascend rl`` is made of, from its settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from megascend.app.rl.engines import stop_tokens
from megascend.config.rl import RlConfig
from megascend.errors import ConfigError
from megascend.rollout.buffer import RolloutBuffer
from megascend.rollout.collector import PromptStream, RolloutCollector, Task
from megascend.rollout.engines.base import InferenceEngine, Sampling
from megascend.rollout.prompts import Prompt, prompt_tokens
from megascend.rollout.rewards import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.backend import Backend


def make_collector(
    config: RlConfig,
    engines: Sequence[InferenceEngine],
    prompts: PromptStream,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward,
) -> RolloutCollector:
    """The collector that a run's settings describe."""
    rollout = config.rollout
    task = Task(
        encode=lambda prompt: prompt_tokens(prompt, tokenizer),
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        reward=reward,
        sampling=Sampling(rollout.max_tokens, stop_token_ids=stop_tokens(tokenizer, rollout.stop), seed=config.seed),
        group_size=rollout.group_size,
        drop_equal=rollout.drop_equal,
    )
    buffer = RolloutBuffer(rollout.prompts_per_step, rollout.max_lag, in_order=rollout.in_order)
    return RolloutCollector(engines, prompts, buffer, task)


def check_lengths(
    config: RlConfig, backend: Backend, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> None:
    """Find out before training that a prompt and its response would not fit.

    Raises:
        ConfigError: the longest prompt and ``max_tokens`` exceed what a sample may have.
    """
    longest = max(len(prompt_tokens(prompt, tokenizer)) for prompt in prompts)
    if longest + config.rollout.max_tokens > backend.max_length:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and rollout.max_tokens is {config.rollout.max_tokens}: together more than "
            f"the {backend.max_length} of a sample (batching.max_length, by default the model's context)"
        )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Tells these prompts from others: xxh3 over all of them, hexadecimal."""
    return xxhash.xxh3_64(json.dumps(prompts, sort_keys=True).encode()).hexdigest()
