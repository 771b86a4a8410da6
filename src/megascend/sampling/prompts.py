"""Log-probabilities of prompts, by the forward pass of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from megascend.backend import Backend
from megascend.batch.sample import Sample
from megascend.sampling.picks import fields_of, of_draws, of_targets, scores
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
    targets: tuple[tuple[float, ...], ...] | None = None
    draws: tuple[TopLogprobs, ...] | None = None


def score_prompts(backend: Backend, step: Step, requests: Asked, seeds: Sequence[int]) -> dict[int, PromptScores]:
    """What requests want to know of their prompts, by their numbers; the same on every rank. Collective.

    Args:
        seeds: of all numbers.
    """
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
    picked = _picked(backend, step, requests, seeds)
    nothing = (None, None)
    return {of: PromptScores(logprobs.get(of), tops.get(of), *picked.get(of, nothing)) for of, _ in requests}


def _picked(backend: Backend, step: Step, requests: Asked, seeds: Sequence[int]) -> dict[int, tuple[Any, Any]]:
    """Log-probabilities of the tokens that requests name, and what is drawn for them, by their numbers."""
    asked = [(of, request) for of, request in requests if request.target_tokens is not None or request.prompt_draws]
    targets = max((len(row) for _, request in asked for row in request.target_tokens or ()), default=0)
    draws = max((request.prompt_draws for _, request in asked), default=0)
    fields = {of: fields_of(request, targets, draws, seeds[of]) for of, request in asked if len(request.prompt) > 1}

    def score(samples: list[Sample]) -> list[tuple[Tensor, ...]]:
        names = ("targets", "ids", "values")
        call = f"prompt tokens ({targets} named, {draws} drawn)"
        found = step.place_scores(call, samples, None, names, scores(targets, draws))
        return list(zip(*(found[name] for name in names), strict=True))

    answers: dict[int, tuple[Any, Any]] = {}
    requested = dict(asked)
    for of, found in _scored(backend, asked, score, fields):
        request = requested[of]
        of_named, ids, values = (None, None, None) if found is None else found
        named = None if request.target_tokens is None else () if of_named is None else of_targets(request, of_named)
        drawn = (
            None
            if not request.prompt_draws
            else ()
            if ids is None or values is None
            else of_draws(request, ids, values)
        )
        answers[of] = (named, drawn)
    return answers


def _pairs(ids: Tensor, values: Tensor, k: int) -> list[TopLogprobs]:
    both = zip(ids[:, :k].tolist(), values[:, :k].tolist(), strict=True)
    return [tuple(zip(tokens, logprobs, strict=True)) for tokens, logprobs in both]


def _scored(
    backend: Backend,
    requests: Asked,
    score: Callable[[list[Sample]], Sequence[T]],
    fields: Mapping[int, dict[str, Tensor]] | None = None,
) -> list[tuple[int, T | None]]:
    """``score`` of the prompts, divided over data parallel ranks, by their requests' numbers; None for a single token.

    Args:
        fields: further ones of each prompt's sample.
    """
    samples = {of: Sample.causal(request.prompt) for of, request in requests if len(request.prompt) > 1}
    for of, request in requests:
        if of in samples:
            samples[of].adapter = request.adapter
            samples[of].extra = fields[of] if fields is not None else {}
    found: dict[int, T] = {}
    if samples:
        numbers = {id(sample): of for of, sample in samples.items()}
        mine = backend.shard(list(samples.values()))
        own = {numbers[id(sample)]: values for sample, values in zip(mine, score(mine), strict=True)}
        for part in backend.gather_by_data_rank(own):
            found.update(part)
    return [(of, found.get(of)) for of, _ in requests]
