"""Log-probabilities of prompts, by the forward pass of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from megascend.backend import Backend
from megascend.batch.sample import Sample
from megascend.sampling.request import SampleRequest, TopLogprobs
from megascend.step.step import Step

T = TypeVar("T")
Asked = Sequence[tuple[int, SampleRequest]]
"""(number, request) of requests."""


@dataclass(frozen=True)
class PromptScores:
    """Of one prompt, as in :class:`megascend.sampling.request.SampleResult`; None for what was not asked for."""

    logprobs: tuple[float | None, ...] | None = None
    top: tuple[TopLogprobs | None, ...] | None = None


def score_prompts(backend: Backend, step: Step, requests: Asked) -> dict[int, PromptScores]:
    """What requests want to know of their prompts, by their numbers; the same on every rank. Collective."""
    logprobs: dict[int, tuple[float | None, ...]] = {}
    asked = [(of, request) for of, request in requests if request.prompt_logprobs]
    for of, values in _scored(
        backend, asked, lambda samples: step.forward(samples, entropy=False, logits=False).logprobs
    ):
        logprobs[of] = (None, *([] if values is None else values.tolist()))
    tops: dict[int, tuple[TopLogprobs | None, ...]] = {}
    asked = [(of, request) for of, request in requests if request.topk_prompt_logprobs]
    wanted = {of: request.topk_prompt_logprobs for of, request in asked}
    most = max(wanted.values(), default=0)
    for of, found in _scored(backend, asked, lambda samples: step.top_logprobs(samples, most)):
        tops[of] = (None, *(() if found is None else _pairs(*found, wanted[of])))
    return {of: PromptScores(logprobs.get(of), tops.get(of)) for of, _ in requests}


def _pairs(ids: Tensor, values: Tensor, k: int) -> list[TopLogprobs]:
    both = zip(ids[:, :k].tolist(), values[:, :k].tolist(), strict=True)
    return [tuple(zip(tokens, logprobs, strict=True)) for tokens, logprobs in both]


def _scored(
    backend: Backend, requests: Asked, score: Callable[[list[Sample]], Sequence[T]]
) -> list[tuple[int, T | None]]:
    """``score`` of the prompts, divided over data parallel ranks, by their requests' numbers; None for a single token."""
    samples = {of: Sample.causal(request.prompt) for of, request in requests if len(request.prompt) > 1}
    for of, request in requests:
        if of in samples:
            samples[of].adapter = request.adapter
    found: dict[int, T] = {}
    if samples:
        numbers = {id(sample): of for of, sample in samples.items()}
        mine = backend.shard(list(samples.values()))
        own = {numbers[id(sample)]: values for sample, values in zip(mine, score(mine), strict=True)}
        for part in backend.gather_by_data_rank(own):
            found.update(part)
    return [(of, found.get(of)) for of, _ in requests]
