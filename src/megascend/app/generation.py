"""What the model answers to given prompts while it learns, on any engine and any layout.

The model answers as it is trained, through the forward pass of the step: whatever the layout, its answer is that of the very
weights and kernels that learn, and no second copy of the model takes memory. The price is that nothing is cached: every token of
an answer takes a forward pass over prompt and answer so far.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megascend.batch.sample import Sample
from megascend.config import Data, Generation, Prompt
from megascend.data.chat import ChatTemplate
from megascend.data.samples import Limits
from megascend.errors import ConfigError
from megascend.rollout.engines.base import Sampling
from megascend.rollout.engines.sampler import Row, draw, make_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.backend import Backend

PROBE = "answerofaprobe"


@dataclass(frozen=True)
class Answer:
    """What the model made of a prompt.

    Attributes:
        prompt: for people; of a conversation, its messages.
        finish_reason: ``stop`` if the answer ended by itself, ``length`` if ``max_tokens`` cut it off.
    """

    prompt: str
    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Answering:
    """Prompts of a run, as tokens, and how answers to them are sampled."""

    settings: Generation
    titles: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[Sampling, ...]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def prepare(
        cls, settings: Generation, data: Data, tokenizer: PreTrainedTokenizerBase, limits: Limits, model: Path
    ) -> Answering:
        """Read the prompts of a run. Local.

        Args:
            tokenizer: with the chat template that the data have been written with.
            model: the model's directory, whose generation_config.json may name tokens that end an answer.

        Raises:
            ConfigError: the tokenizer has no chat template, or a prompt with its answer would be too long.
            DataError: the chat template refuses a prompt.
        """
        if settings.chat and not tokenizer.chat_template:
            raise ConfigError(
                "generation: the model's tokenizer has no chat template; set generation.chat: false to have prompts continued as "
                "they are, or name a template with data.chat_template"
            )
        template = ChatTemplate(tokenizer, data.chat_template_options) if settings.chat else None
        prompts = tuple(tuple(_tokens(prompt, template, tokenizer)) for prompt in settings.prompts)
        for prompt, tokens in zip(settings.prompts, prompts, strict=True):
            if len(tokens) + settings.max_tokens > limits.length:
                raise ConfigError(
                    f"generation: the prompt {_title(prompt)!r:.60} has {len(tokens)} tokens and generation.max_tokens is "
                    f"{settings.max_tokens}: together more than {limits.length} ({limits.setting})"
                )
        stops = tuple(sorted(stop_tokens(tokenizer, model, template)))
        sampling = tuple(
            Sampling(settings.max_tokens, settings.temperature, stops, seed=settings.seed + number)
            for number in range(len(prompts))
        )
        return cls(settings, tuple(map(_title, settings.prompts)), prompts, sampling, tokenizer)

    def due(self, step: int, last: int) -> bool:
        """Whether the model answers after ``step``: at intervals, and at the end."""
        return step % self.settings.every == 0 or step == last

    def answer(self, backend: Backend, adapter: str | None) -> list[Answer]:
        """Have the model answer all prompts; the same on every rank. Collective."""
        rows = [
            make_rows(prompt, sampling, 1, seed=0)[0]
            for prompt, sampling in zip(self.prompts, self.sampling, strict=True)
        ]
        while open_rows := [row for row in rows if not row.done]:
            _extend(backend, rows, open_rows, adapter)
        return [self._answer(title, row) for title, row in zip(self.titles, rows, strict=True)]

    def _answer(self, title: str, row: Row) -> Answer:
        tokens = row.tokens[:-1] if row.stopped else row.tokens
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return Answer(title, text, len(row.tokens), row.completion().finish_reason)


def _extend(backend: Backend, rows: Sequence[Row], open_rows: Sequence[Row], adapter: str | None) -> None:
    """Sample the next token of ``open_rows``: each data parallel rank of its share, and told to all."""
    samples = [sample_of([*row.prompt, *row.tokens]) for row in open_rows]
    owners = {id(sample): row for sample, row in zip(samples, open_rows, strict=True)}
    mine = backend.shard(samples)
    logits = backend.next_token_logits(mine, adapter)
    chosen: dict[int, tuple[int, float]] = {}
    if mine:
        own = [owners[id(sample)] for sample in mine]
        tokens, logprobs = draw(torch.stack(logits), own)
        numbers = {id(row): number for number, row in enumerate(rows)}
        chosen = {numbers[id(row)]: (t, p) for row, t, p in zip(own, tokens, logprobs, strict=True)}
    for part in backend.gather_by_data_rank(chosen):
        for number, (token, logprob) in part.items():
            rows[number].add(token, logprob, version=0)


def sample_of(tokens: Sequence[int]) -> Sample:
    """Tokens whose continuation is asked for; nothing in them is a target."""
    return Sample(input_ids=list(tokens), target_ids=list(tokens), weights=[0.0] * len(tokens))


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: Path, template: ChatTemplate | None) -> set[int]:
    """Tokens that end an answer: the tokenizer's, the model's (generation_config.json), what closes the assistant's turn."""
    found: list[Any] = [tokenizer.eos_token_id]
    try:
        named = json.loads((model / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    except (OSError, ValueError, AttributeError):
        pass  # many models have none
    if template is not None:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        behind = template.render(turns).rpartition(PROBE)[2].lstrip()
        found += [number for text, number in _special(tokenizer).items() if text and behind.startswith(text)]
    return {number for number in found if isinstance(number, int)}


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return dict(zip(map(str, tokenizer.all_special_tokens), tokenizer.all_special_ids, strict=True))


def _tokens(prompt: Prompt, template: ChatTemplate | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if template is not None:
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = template.render(messages, prompt=True)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[arg-type]
    tokens: list[int] = list(tokenizer(prompt, verbose=False)["input_ids"])  # type: ignore[arg-type]
    return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens


def _title(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{each['role']}: {each['content']}" for each in prompt)
