"""The next token of every row, from the logits of the place before it. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen.

    Attributes:
        temperature, top_p, top_k: as in :class:`megascend.sampling.request.SamplingParams`.
        uniform: number in [0, 1) that decides.
    """

    temperature: float
    uniform: float
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Chosen:
    """Tokens of all rows.

    Attributes:
        tokens: token ids.
        logprobs: of the model's own distribution (temperature 1, whole vocabulary).
        drawn_logprobs: of the distribution that the token was drawn from; 0 for the likeliest token at temperature 0.
    """

    tokens: list[int]
    logprobs: list[float]
    drawn_logprobs: list[float]


def uniform(seed: int, sample: int, position: int) -> float:
    """In [0, 1), from its arguments alone: what token ``position`` of a request's response ``sample`` is drawn with."""
    content = f"{seed} {sample} {position}".encode()
    (number,) = struct.unpack("<Q", hashlib.blake2b(content, digest_size=8).digest())
    return (number >> 11) / 2**53


def choose(logits: Tensor, draws: Sequence[Draw]) -> Chosen:
    """Choose a token for every row of ``logits`` [rows, vocabulary]; NaN is never chosen unless nothing else is there.

    A token is drawn by inverting the cumulative distribution in fp64: the first token at which it exceeds the uniform number.
    """
    wide = logits.double()
    model = wide.log_softmax(-1)
    heat = torch.tensor([draw.temperature for draw in draws], dtype=torch.float64, device=logits.device)
    numbers = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=logits.device)
    greedy = heat == 0
    drawn_from = (wide / torch.where(greedy, 1.0, heat)[:, None]).log_softmax(-1)
    for row, draw in enumerate(draws):
        if draw.temperature > 0 and (draw.top_p < 1 or 0 < draw.top_k < logits.shape[-1]):
            drawn_from[row] = truncated(drawn_from[row], draw.top_k, draw.top_p)
    cumulative = drawn_from.exp().cumsum(-1)
    wanted = numbers[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, wide.argmax(-1), drawn)
    of_model, of_drawn = (each.gather(1, tokens[:, None])[:, 0] for each in (model, drawn_from))
    return Chosen(tokens.tolist(), of_model.tolist(), torch.where(greedy, 0.0, of_drawn).tolist())


def truncated(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """``logprobs`` [vocabulary] of what is left of a distribution; minus infinity elsewhere.

    First the ``top_k`` likeliest tokens are kept, then of these the fewest likeliest that have ``top_p`` of what they have
    together. Of equally likely tokens the one with the smaller id counts as the likelier one. One token is always left.
    """
    ordered, ids = logprobs.sort(descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered, ids = ordered[:top_k], ids[:top_k]
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = before < top_p
    kept[0] = True
    ids = ids[kept]
    left = torch.full_like(logprobs, -torch.inf)
    left[ids] = logprobs[ids].log_softmax(-1)
    return left


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """int64 ids and fp32 log-probabilities [rows, k] of the ``k`` likeliest tokens of [rows, vocabulary], likeliest first."""
    found = logits.float().log_softmax(-1).topk(k, dim=-1)
    return found.indices, found.values
