"""Choice of every row's next token from logits. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Sampling parameters and random number for one row's next token.

    Attributes:
        temperature, top_p, top_k: as in :class:`megascend.apps.sampling.request.SamplingParams`.
        uniform: random number in [0, 1) that selects the token.
    """

    temperature: float
    uniform: float
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class ChosenTokens:
    """Chosen tokens of all rows.

    Attributes:
        tokens: token ids.
        logprobs: log-probabilities under the model's distribution (temperature 1, full vocabulary).
        drawn_logprobs: log-probabilities under the distribution that the token was drawn from; 0 for the likeliest token at
            temperature 0.
        allowed: for each row with a ``top_p`` or ``top_k`` that excludes tokens the others' ids, ascending; None for others.
    """

    tokens: list[int]
    logprobs: list[float]
    drawn_logprobs: list[float]
    allowed: list[tuple[int, ...] | None]


def uniform(seed: int, sample: int, position: int) -> float:
    """Return the number in [0, 1) that draws token ``position`` of a request's response ``sample``: a hash of the arguments."""
    # A hash, not a stream: a row draws the same numbers in every batch.
    content = f"{seed} {sample} {position}".encode()
    (number,) = struct.unpack("<Q", hashlib.blake2b(content, digest_size=8).digest())
    return (number >> 11) / 2**53  # 53 bits, the precision of a float: the result is below 1


def choose(logits: Tensor, draws: Sequence[Draw]) -> ChosenTokens:
    """Choose a token for every row of ``logits`` [rows, vocabulary]; NaN is never chosen unless all are NaN.

    A token is drawn by inverting the cumulative distribution in fp64: the first token at which it exceeds the uniform number.
    """
    wide = logits.double()  # fp32 sums over a vocabulary lose tokens of small probability
    model_distribution = wide.log_softmax(-1)
    temperature = torch.tensor([draw.temperature for draw in draws], dtype=torch.float64, device=logits.device)
    uniforms = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=logits.device)
    greedy = temperature == 0
    # Divided by 1 at temperature 0, where argmax chooses below.
    drawn_distribution = (wide / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    allowed: list[tuple[int, ...] | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if draw.temperature > 0 and (draw.top_p < 1 or 0 < draw.top_k < logits.shape[-1]):
            drawn_distribution[row] = truncated(drawn_distribution[row], draw.top_k, draw.top_p)
            allowed[row] = tuple((drawn_distribution[row] > -torch.inf).nonzero()[:, 0].tolist())
    cumulative = drawn_distribution.exp().cumsum(-1)
    # The last sum differs from 1 by rounding; a threshold beyond it would select no token.
    thresholds = uniforms[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, wide.argmax(-1), sampled)
    model_logprobs, drawn_logprobs = (
        logprobs.gather(1, tokens[:, None])[:, 0] for logprobs in (model_distribution, drawn_distribution)
    )
    drawn_logprobs = torch.where(greedy, 0.0, drawn_logprobs)
    return ChosenTokens(tokens.tolist(), model_logprobs.tolist(), drawn_logprobs.tolist(), allowed)


def truncated(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Truncate a distribution: return renormalised ``logprobs`` [vocabulary], minus infinity for excluded tokens.

    First the ``top_k`` likeliest tokens are kept, then of these the fewest likeliest that have ``top_p`` of their total
    probability. Of equally likely tokens the smaller id counts as likelier. At least one token is kept.
    """
    ordered, ids = logprobs.sort(descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered, ids = ordered[:top_k], ids[:top_k]
    probabilities = ordered.softmax(-1)
    # The mass before a token, so that the one that crosses top_p is kept.
    mass_before = probabilities.cumsum(-1) - probabilities
    mask = mass_before < top_p
    mask[0] = True
    ids = ids[mask]
    result = torch.full_like(logprobs, -torch.inf)
    result[ids] = logprobs[ids].log_softmax(-1)
    return result


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return int64 ids and fp32 log-probabilities [rows, k] of the ``k`` likeliest tokens, likeliest first."""
    top = logits.float().log_softmax(-1).topk(k, dim=-1)
    return top.indices, top.values
