"""Batched sampling from a model of transformers, one token of all rows at a time, with log-probabilities.

Rows are padded on the left. Every row draws from a random stream of its own, so that what it samples does not depend on the
rows beside it (but for rounding in the model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megascend.sampling.choice import Draw, choose, uniform
from weightwire.engine import Completion, Sampling


@dataclass
class Row:
    """One response on its way.

    Attributes:
        prompt: token ids.
        sampling: how it is sampled.
        seed: of its request.
        number: among the request's responses.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> bool:
        """Nothing more is to be sampled."""
        return self.stopped or len(self.tokens) >= self.sampling.max_tokens

    def add(self, token: int, logprob: float, version: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.stopped = token in self.sampling.stop_token_ids

    def completion(self) -> Completion:
        """The finished response."""
        reason = "stop" if self.stopped else "length"
        return Completion(tuple(self.tokens), tuple(self.logprobs), reason, self.versions[0], self.versions[-1])


def make_rows(prompt: Sequence[int], sampling: Sampling, n: int, seed: int) -> list[Row]:
    """``n`` rows for one prompt.

    Args:
        seed: of this request, unless ``sampling`` has one.
    """
    start = seed if sampling.seed is None else sampling.seed
    return [Row(prompt, sampling, start, number) for number in range(n)]


@torch.no_grad()
def sample(model: Any, rows: Sequence[Row], step: Callable[[], AbstractContextManager[int]], pad: int = 0) -> None:
    """Sample all rows to their ends, in place.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        step: a context manager around each forward pass, which yields the version of the weights; they may change between two.
            The cache is then computed again, so that no token comes from states of other weights.
        pad: any token id.
    """
    device = next(model.parameters()).device
    # transformers 5 has renamed it, and warns of the earlier name.
    argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache: Any = None
    version, mask = -1, torch.empty(0)
    while not all(row.done for row in rows):
        with step() as current:
            if cache is None or current != version:
                version = current
                ids, mask = left_padded(rows, pad, device)
                output = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=True)
            else:  # only the newest token; rows that are done go along unread
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                ids = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
                place = positions(mask)[:, -1:]
                earlier = {argument: cache}
                output = model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=True, **earlier)
            cache = output["cache" if "cache" in output else "past_key_values"]
            tokens, logprobs = draw(output.logits[:, -1], rows)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if not row.done:
                row.add(token, logprob, current)


def left_padded(rows: Sequence[Row], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts with what has been sampled so far, int64 [rows, longest], and the mask of what is not padding, int64."""
    whole = [[*row.prompt, *row.tokens] for row in rows]
    longest = max(map(len, whole))
    ids = torch.tensor([[pad] * (longest - len(tokens)) + tokens for tokens in whole], device=device)
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in whole], device=device)
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Position of every token in its row, padding left out; int64 like ``mask``."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def draw(logits: Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """The next token of every row, and the logarithm of the probability that it had.

    Args:
        logits: [rows, vocabulary], of the position before it.
    """
    draws = [Draw(row.sampling.temperature, uniform(row.seed, row.number, len(row.tokens))) for row in rows]
    found = choose(logits, draws)
    return found.tokens, found.drawn_logprobs


@torch.no_grad()
def sequence_logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    """log p(token | those before it) of all tokens but the first."""
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
