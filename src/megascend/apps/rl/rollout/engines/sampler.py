"""Batched sampling from a transformers model, one token per row at a time, with log-probabilities.

Rows are padded on the left. Every row has its own random stream, so that its samples do not depend on the other rows of the
batch (but for rounding in the model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megascend.apps.sampling.choice import ChosenTokens, Draw, choose, uniform
from weightwire.engine import Completion, Sampling, TopLogprobs


@dataclass
class Row:
    """A response being sampled.

    Attributes:
        number: index among the request's responses.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    allowed: list[tuple[int, ...]] = field(default_factory=list)
    stopped: bool = False

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.tokens) >= self.sampling.max_tokens

    def add(self, token: int, logprob: float, version: int, allowed: tuple[int, ...] | None) -> None:
        """Append the next token, drawn from the ``allowed`` ones; None or all of the vocabulary."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.allowed.append(allowed or ())
        self.stopped = token in self.sampling.stop_token_ids

    def completion(self) -> Completion:
        reason = "stop" if self.stopped else "length"
        allowed = tuple(self.allowed) if self.sampling.truncates else None
        versions = self.versions[0], self.versions[-1]
        return Completion(tuple(self.tokens), tuple(self.logprobs), reason, *versions, allowed=allowed)


def make_rows(prompt: Sequence[int], sampling: Sampling, n: int, seed: int) -> list[Row]:
    """Create ``n`` rows for one prompt.

    Args:
        seed: seed of the request, if ``sampling`` has none.
    """
    start = seed if sampling.seed is None else sampling.seed
    return [Row(prompt, sampling, start, number) for number in range(n)]


@torch.no_grad()
def sample(model: Any, rows: Sequence[Row], step: Callable[[], AbstractContextManager[int]], pad: int = 0) -> None:
    """Sample all rows to their ends, in place.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        step: a context manager around each forward pass, which yields the version of the weights; they may change in between.
            The KV cache is then recomputed, so that no token depends on states of old weights.
        pad: any token id.
    """
    device = next(model.parameters()).device
    # transformers 5 renamed the argument, and warns of the old name.
    argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache: Any = None
    version, mask = -1, torch.empty(0)
    while not all(row.finished for row in rows):
        with step() as current:
            # A token must not attend to states of weights that are gone.
            if cache is None or current != version:
                version = current
                ids, mask = left_padded(rows, pad, device)
                output = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=True)
            else:  # only the newest token; finished rows stay in the batch, and their output is ignored
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                ids = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
                position = positions(mask)[:, -1:]
                # Under the name that this version of transformers has.
                past = {argument: cache}
                output = model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True, **past)
            cache = output["cache" if "cache" in output else "past_key_values"]
            choice = draw(output.logits[:, -1], rows)
        for row, token, logprob, allowed in zip(
            rows, choice.tokens, choice.drawn_logprobs, choice.allowed, strict=True
        ):
            if not row.finished:
                row.add(token, logprob, current, allowed)


def left_padded(rows: Sequence[Row], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts with the tokens sampled so far, int64 [rows, longest], and their attention mask, int64."""
    sequences = [[*row.prompt, *row.tokens] for row in rows]
    longest = max(map(len, sequences))
    ids = torch.tensor([[pad] * (longest - len(tokens)) + tokens for tokens in sequences], device=device)
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in sequences], device=device)
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Return the position of every token in its row, not counting padding; int64 like ``mask``."""
    # Padding on the left must not shift positions; its own are never attended to.
    return (mask.cumsum(-1) - 1).clamp(min=0)


def draw(logits: Tensor, rows: Sequence[Row]) -> ChosenTokens:
    """Sample the next token of every row.

    Args:
        logits: [rows, vocabulary], of the preceding position.
    """
    # A draw depends on request, row and position alone: other rows of the batch do not change it.
    draws = [
        Draw(
            row.sampling.temperature,
            uniform(row.seed, row.number, len(row.tokens)),
            row.sampling.top_p,
            row.sampling.top_k,
        )
        for row in rows
    ]
    return choose(logits, draws)


@torch.no_grad()
def sequence_logprobs(model: Any, tokens: Sequence[int], count: int = 0) -> TopLogprobs:
    """Compute log p(token | preceding tokens) of all tokens but the first, and the ``count`` likeliest tokens at each."""
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    top = logprobs.topk(min(count, logprobs.shape[1]))
    return TopLogprobs(
        tuple(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()),
        tuple(map(tuple, top.indices.tolist())),
        tuple(map(tuple, top.values.tolist())),
    )
