"""Log-probabilities at the positions of prompts: of their tokens, the likeliest, requested targets and draws."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megascend.apps.sampling.request import SampleRequest, TopLogprobs
from megascend.backend import Backend
from megascend.engines.base import Output
from megascend.engines.step.step import LOGIT_ROWS, Step
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.sample import Sample

T = TypeVar("T")
IndexedRequests = Sequence[tuple[int, SampleRequest]]
"""(index, request) of requests."""


@dataclass(frozen=True)
class PromptScores:
    """Scores of one prompt, as in :class:`megascend.apps.sampling.request.SampleResult`; None for those not requested."""

    logprobs: tuple[float | None, ...] | None = None
    top: tuple[TopLogprobs | None, ...] | None = None
    targets: tuple[tuple[float, ...], ...] | None = None
    draws: tuple[TopLogprobs, ...] | None = None


def score_prompts(
    backend: Backend, step: Step, requests: IndexedRequests, seeds: Sequence[int]
) -> dict[int, PromptScores]:
    """Return scores of prompts by request index, the same on every rank; ``seeds``: by request index. Collective."""
    logprobs: dict[int, tuple[float | None, ...]] = {}
    selected = [(index, request) for index, request in requests if request.prompt_logprobs]
    for index, values in _scored(
        backend, selected, lambda samples: step.forward(samples, entropy=False, logits=False).logprobs
    ):
        # Nothing predicts the first token.
        logprobs[index] = (None, *([] if values is None else values.tolist()))
    tops: dict[int, tuple[TopLogprobs | None, ...]] = {}
    selected = [(index, request) for index, request in requests if request.topk_prompt_logprobs]
    counts = {index: request.topk_prompt_logprobs for index, request in selected}
    largest = max(counts.values(), default=0)
    for index, top in _scored(backend, selected, lambda samples: step.top_logprobs(samples, largest)):
        tops[index] = (None, *(() if top is None else _pairs(*top, counts[index])))
    targets_and_draws = _score_targets_and_draws(backend, step, requests, seeds)
    return {
        index: PromptScores(logprobs.get(index), tops.get(index), *targets_and_draws.get(index, (None, None)))
        for index, _ in requests
    }


def _score_targets_and_draws(
    backend: Backend, step: Step, requests: IndexedRequests, seeds: Sequence[int]
) -> dict[int, tuple[Any, Any]]:
    """Return (log-probabilities of ``target_tokens``, draws) by request index."""
    selected = {
        index: request for index, request in requests if request.target_tokens is not None or request.prompt_draws
    }
    # One call for all requests, with as many columns as the largest needs.
    targets = max((len(row) for request in selected.values() for row in request.target_tokens or ()), default=0)
    draws = max((request.prompt_draws for request in selected.values()), default=0)
    fields = {
        index: prompt_fields(request, targets, draws, seeds[index])
        for index, request in selected.items()
        if len(request.prompt) > 1
    }

    def score(samples: list[Sample]) -> list[tuple[Tensor, ...]]:
        names = ("targets", "ids", "values")
        call = f"prompt tokens ({targets} named, {draws} drawn)"
        tensors = step.token_scores(call, samples, None, names, _target_and_draw_scores(targets, draws))
        return list(zip(*(tensors[name] for name in names), strict=True))

    results: dict[int, tuple[Any, Any]] = {}
    for index, tensors in _scored(backend, list(selected.items()), score, fields):
        request = selected[index]
        target_values, ids, values = (None, None, None) if tensors is None else tensors
        target_logprobs = draw_logprobs = None
        if request.target_tokens is not None:
            target_logprobs = () if target_values is None else _target_logprobs(request, target_values)
        if request.prompt_draws:
            draw_logprobs = () if ids is None or values is None else tuple(_pairs(ids, values, request.prompt_draws))
        results[index] = (target_logprobs, draw_logprobs)
    return results


def _pairs(ids: Tensor, values: Tensor, k: int) -> list[TopLogprobs]:
    """Return the first ``k`` (token id, log-probability) pairs at every position."""
    rows = zip(ids[:, :k].tolist(), values[:, :k].tolist(), strict=True)
    return [tuple(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]


def _target_logprobs(request: SampleRequest, values: Tensor) -> tuple[tuple[float, ...], ...]:
    """Return log-probabilities in the shape of ``target_tokens``, 0 for -1."""
    assert request.target_tokens is not None
    # Rows of values may be longer: they have as many columns as the longest row of all requests.
    rows = zip(request.target_tokens, values.tolist(), strict=True)
    return tuple(
        tuple(value if token >= 0 else 0.0 for token, value in zip(tokens, row, strict=False)) for tokens, row in rows
    )


def _scored(
    backend: Backend,
    requests: IndexedRequests,
    score: Callable[[list[Sample]], Sequence[T]],
    fields: Mapping[int, dict[str, Tensor]] | None = None,
) -> list[tuple[int, T | None]]:
    """Return ``score`` of the prompts, divided over data parallel ranks, by index; None for a prompt of one token."""
    samples = {
        index: Sample.causal(request.prompt, images=request.images)
        for index, request in requests
        if len(request.prompt) > 1
    }
    for index, request in requests:
        if index in samples:
            samples[index].adapter = request.adapter
            samples[index].extra = fields[index] if fields is not None else {}
    results: dict[int, T] = {}
    if samples:
        # By identity: shard() returns these objects.
        index_of = {id(sample): index for index, sample in samples.items()}
        share = backend.shard(list(samples.values()))
        local = {index_of[id(sample)]: values for sample, values in zip(share, score(share), strict=True)}
        for part in backend.gather_by_data_rank(local):
            results.update(part)
    return [(index, results.get(index)) for index, _ in requests]


FP64_ROWS = 64
"""Rows of logits that are converted to fp64 at a time."""


def prompt_fields(request: SampleRequest, targets: int, draws: int, seed: int) -> dict[str, Tensor]:
    """Return a request's extra fields for a call of ``targets`` and ``draws``, float32 [prompt - 1]; ids are exact up to 2^24."""
    length = len(request.prompt) - 1
    fields: dict[str, Tensor] = {"temperature": torch.full((length,), request.params.temperature)}
    columns = list(zip(*request.target_tokens, strict=True)) if request.target_tokens else []
    for number in range(targets):
        # -1 marks an unused position: any id will do, since its result is replaced by 0.
        column = columns[number] if number < len(columns) else (0,) * length
        fields[f"target {number}"] = torch.tensor(column, dtype=torch.float32).clamp_(min=0)
    # A stream of random numbers apart from the responses'.
    content = hashlib.blake2b(f"{seed} prompt".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(content, "little"))
    uniforms = torch.rand(request.prompt_draws, length, generator=generator)
    for number in range(draws):
        fields[f"draw {number}"] = uniforms[number] if number < len(uniforms) else torch.zeros(length)
    return fields


def _target_and_draw_scores(targets: int, draws: int) -> Any:
    """Return a function from a micro batch's logits to ``targets``, ``ids`` and ``values``, [tokens, targets or draws]."""

    def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
        def field(name: str, rows: Tensor) -> Tensor:
            values = batch.fields.get(name)  # absent on a rank without samples
            return torch.zeros(len(rows)) if values is None else values.cpu()[rows]

        parts = []
        for rows in torch.arange(len(batch.targets)).split(LOGIT_ROWS):
            target_ids = [field(f"target {number}", rows) for number in range(targets)]
            uniforms = [field(f"draw {number}", rows) for number in range(draws)]
            logits = output.logits(rows)
            temperatures = field("temperature", rows)
            parts.append(
                score_and_draw(logits, _columns(target_ids, rows).long(), _columns(uniforms, rows), temperatures)
            )
        names = ("targets", "ids", "values")
        return {name: torch.cat([part[number] for part in parts]) for number, name in enumerate(names)}

    return scores


def _columns(columns: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.stack(list(columns), dim=1) if columns else torch.zeros(len(rows), 0)


def score_and_draw(
    logits: Tensor, target_ids: Tensor, uniforms: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Score target tokens and draw tokens; log-probabilities are of the model's distribution, at temperature 1.

    Args:
        logits: [rows, vocabulary]; all tensors are on the CPU.
        target_ids: int64 [rows, n].
        uniforms: [rows, k], random numbers in [0, 1) for the draws.
        temperatures: [rows], of the draws; 0: the likeliest token.

    Returns:
        float32 [rows, n] of the targets, int64 [rows, k] and float32 [rows, k] of the draws.
    """
    parts = []
    for part in torch.arange(len(logits)).split(FP64_ROWS):
        wide = logits[part].double()
        model = wide.log_softmax(-1)
        temperature, numbers = temperatures[part, None].double(), uniforms[part].double()
        cumulative = (wide / torch.where(temperature == 0, 1.0, temperature)).softmax(-1).cumsum(-1)
        ids = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True).clamp(max=wide.shape[-1] - 1)
        ids = torch.where(temperature == 0, wide.argmax(-1, keepdim=True), ids)
        parts.append((model.gather(1, target_ids[part]), ids, model.gather(1, ids)))
    target_logprobs, ids, draw_logprobs = (torch.cat([part[number] for part in parts]) for number in range(3))
    return target_logprobs.float(), ids, draw_logprobs.float()
