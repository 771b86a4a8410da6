"""Log-probabilities of prompts: of their own tokens, the likeliest, tokens that a request names, and tokens drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascend.backend import Backend
from megascend.batch.micro_batch import MicroBatch
from megascend.batch.sample import Sample
from megascend.engines.base import Output
from megascend.sampling.request import SampleRequest, TopLogprobs
from megascend.step.step import ROWS, Step

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
    """Return scores of prompts by their requests' numbers, the same on every rank; ``seeds``: of all numbers. Collective."""
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
    """Return ``score`` of the prompts, divided over data parallel ranks, by number; None for a prompt of one token."""
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


AT_ONCE = 64
"""Rows of logits that are taken in fp64 at a time."""


def fields_of(request: SampleRequest, targets: int, draws: int, seed: int) -> dict[str, Tensor]:
    """Return a request's extra fields for a call of ``targets`` and ``draws``, float32 [prompt - 1]; ids are exact up to 2^24."""
    length = len(request.prompt) - 1
    found: dict[str, Tensor] = {"temperature": torch.full((length,), request.params.temperature)}
    columns = list(zip(*request.target_tokens, strict=True)) if request.target_tokens else []
    for number in range(targets):
        column = columns[number] if number < len(columns) else (0,) * length
        found[f"target {number}"] = torch.tensor(column, dtype=torch.float32).clamp_(min=0)
    content = hashlib.blake2b(f"{seed} prompt".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(content, "little"))
    mine = torch.rand(request.prompt_draws, length, generator=generator)
    for number in range(draws):
        found[f"draw {number}"] = mine[number] if number < len(mine) else torch.zeros(length)
    return found


def scores(targets: int, draws: int) -> Any:
    """What makes of a micro batch's logits the tensors ``targets``, ``ids`` and ``values``, [places, targets or draws]."""

    def found(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
        def field(name: str, rows: Tensor) -> Tensor:
            whole = batch.fields.get(name)  # of samples that other ranks have, there is none
            return torch.zeros(len(rows)) if whole is None else whole.cpu()[rows]

        parts = []
        for rows in torch.arange(len(batch.targets)).split(ROWS):
            named = [field(f"target {number}", rows) for number in range(targets)]
            uniforms = [field(f"draw {number}", rows) for number in range(draws)]
            logits = output.logits(rows)
            parts.append(
                picked(logits, _columns(named, rows).long(), _columns(uniforms, rows), field("temperature", rows))
            )
        names = ("targets", "ids", "values")
        return {name: torch.cat([part[number] for part in parts]) for number, name in enumerate(names)}

    return found


def _columns(found: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.stack(list(found), dim=1) if found else torch.zeros(len(rows), 0)


def picked(logits: Tensor, named: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of named tokens, and drawn tokens with theirs: those of the model's own distribution, at temperature 1.

    Args:
        logits: [rows, vocabulary], on the CPU like all others.
        named: int64 [rows, n].
        uniforms: [rows, k], in [0, 1): what each draw is decided by.
        temperatures: [rows], of the draws; 0: the likeliest token.

    Returns:
        float32 [rows, n], int64 [rows, k], float32 [rows, k].
    """
    parts = []
    for part in torch.arange(len(logits)).split(AT_ONCE):
        mine = logits[part].double()
        model = mine.log_softmax(-1)
        heat, drawn = temperatures[part, None].double(), uniforms[part].double()
        cumulative = (mine / torch.where(heat == 0, 1.0, heat)).softmax(-1).cumsum(-1)
        ids = torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True).clamp(max=mine.shape[-1] - 1)
        ids = torch.where(heat == 0, mine.argmax(-1, keepdim=True), ids)
        found = (model.gather(1, named[part]), ids, model.gather(1, ids))
        parts.append(found)
    of_named, ids, of_drawn = (torch.cat([part[number] for part in parts]) for number in range(3))
    return of_named.float(), ids, of_drawn.float()


def of_targets(request: SampleRequest, values: Tensor) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities as the request names its tokens, 0 where it names none."""
    assert request.target_tokens is not None
    rows = zip(request.target_tokens, values.tolist(), strict=True)
    return tuple(
        tuple(value if token >= 0 else 0.0 for token, value in zip(tokens, found, strict=False))
        for tokens, found in rows
    )


def of_draws(request: SampleRequest, ids: Tensor, values: Tensor) -> tuple[TopLogprobs, ...]:
    """(token id, log-probability) of a request's draws at every place."""
    count = request.prompt_draws
    both = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return tuple(tuple(zip(tokens, found, strict=True)) for tokens, found in both)
