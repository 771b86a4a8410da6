"""Logits of the next token by the forward pass of the step, without a cache: on any engine and any layout."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from megascend.batch.sample import Sample
from megascend.sampling.rows import Row
from megascend.step.step import Step


class Recomputed:
    """See :class:`megascend.sampling.decoder.Decoder`: prompt and response so far go through the model for every token."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def logits(self, rows: Sequence[Row]) -> Tensor | None:
        samples = [sample_of(row) for row in rows]
        found = self._step.next_token_logits(samples, everywhere=False)
        return torch.stack(found) if found else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is kept."""


def sample_of(row: Row) -> Sample:
    """Prompt and response so far; nothing in them is a target."""
    tokens = [*row.request.prompt, *row.tokens]
    return Sample(tokens, tokens, [0.0] * len(tokens), adapter=row.request.adapter)
