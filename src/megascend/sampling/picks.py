"""Tokens that a request names at the places of its prompt, and tokens that are drawn there, with their log-probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.engines.base import Output
from megascend.sampling.request import SampleRequest, TopLogprobs
from megascend.step.step import ROWS

AT_ONCE = 64
"""Rows of logits that are taken in fp64 at a time."""


def fields_of(request: SampleRequest, targets: int, draws: int, seed: int) -> dict[str, Tensor]:
    """What the forward pass needs beside the prompt, float32 [prompt - 1] each; ids of tokens are exact up to 2^24.

    Args:
        targets, draws: of the call; this request's own may be fewer.
    """
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
