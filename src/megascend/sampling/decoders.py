"""Logits of the next token: by the whole forward pass, on any engine and layout, or with a cache of keys and values."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from megascend.batch.micro_batch import MicroBatch, next_tokens
from megascend.batch.sample import Sample
from megascend.engines.base import Engine, Output
from megascend.engines.key_values import Filling, Growing, KeyValues
from megascend.sampling.rows import ResponseRow
from megascend.step.step import Step


class Decoder(AbstractContextManager["Decoder"], ABC):
    """The model on the rows of one batch, from its first token to its last.

    Entered before some of the tokens and left after them, on all ranks; outside, the model is free for other things.
    """

    @abstractmethod
    def logits(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        """fp32 [rows, vocabulary] on the CPU: what follows each row's prompt and response so far. Collective.

        None where the logits do not come out (pipeline stages before the last), or there are no rows.

        Args:
            rows: this data parallel rank's that are not done; perhaps none. From one call to the next each has one token more,
                and rows that are done are left out; none is new, and their order stays.
        """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep nothing in force."""


class Recomputed(Decoder):
    """Prompt and response so far go through the model for every token."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def logits(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        samples = [sample_of(row) for row in rows]
        found = self._step.next_token_logits(samples, everywhere=False)
        return torch.stack(found) if found else None


def sample_of(row: ResponseRow) -> Sample:
    """Prompt and response so far; nothing in them is a target."""
    tokens = [*row.request.prompt, *row.tokens]
    return Sample(tokens, tokens, [0.0] * len(tokens), adapter=row.request.adapter)


class Cached(Decoder):
    """A prompt goes through the model once, however many responses it gets.

    Args:
        batch: all rows, of all data parallel ranks.
    """

    def __init__(self, step: Step, engine: Engine, batch: Sequence[ResponseRow]) -> None:
        self._step, self._engine = step, engine
        self._order = sorted({row.request.adapter or "" for row in batch})
        self._longest = max(row.longest for row in batch)
        self._cache: KeyValues | None = None
        self._numbers: list[int] = []  # of the rows that the cache has
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._engine.caching())
        if self._cache is not None:
            self._evaluate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def logits(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        return self._start(rows) if self._cache is None else self._continue(rows, self._cache)

    def _start(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        """Take the prompts through the model."""
        prompts = {row.of: row for row in rows}
        samples = [sample_of(row) for row in prompts.values()]
        self._cache = cache = KeyValues(len(samples), self._longest, self._engine.device)

        def keep(batch: MicroBatch) -> None:
            batch.cached = Filling(cache, tuple(batch.members), tuple(batch.lengths), tuple(batch.padded_lengths))

        found = self._step.next_token_logits(samples, everywhere=False, on_batch=keep)
        places = {of: place for place, of in enumerate(prompts)}
        own = [places[row.of] for row in rows]
        cache.take(own)
        self._numbers = [row.number for row in rows]
        self._evaluate()
        return torch.stack(found)[own] if found else None

    def _evaluate(self) -> None:
        """Dropout off and the rows' adapters in force until the decoder is left."""
        self._open.enter_context(self._engine.evaluating())
        self._open.enter_context(self._engine.trainable.applying(self._order))

    def _continue(self, rows: Sequence[ResponseRow], cache: KeyValues) -> Tensor | None:
        """Take the newest token of every row through the model."""
        index = [self._order.index(row.request.adapter or "") for row in rows]
        order = sorted(range(len(rows)), key=lambda place: index[place])  # adapters lie in runs of tokens
        places = {number: place for place, number in enumerate(self._numbers)}
        cache.take([places[rows[place].number] for place in order])
        self._numbers = [rows[place].number for place in order]
        parts = torch.arange(len(rows)).tensor_split(
            self._engine.topology.pipeline
        )  # so that all stages have something to do
        batches = []
        for part in parts:
            members = order[part[0] : part[-1] + 1] if len(part) else []
            growing = Growing(cache, slice(int(part[0]), int(part[-1]) + 1)) if members else None
            chosen = [rows[place] for place in members]
            batches.append(self._batch(chosen, [index[place] for place in members], growing))

        def scores(batch: MicroBatch, output: Output) -> tuple[Tensor, Tensor]:
            return batch.weights.sum(), output.logits(torch.arange(int((~batch.padding).sum()) if batch.cached else 0))

        if rows:
            cache.begin()
        stored = self._engine.run(batches, scores, forward_only=True)
        cache.advance()
        return torch.cat(stored)[torch.tensor(order).argsort()] if rows and stored else None

    def _batch(self, rows: Sequence[ResponseRow], index: Sequence[int], growing: Growing | None) -> MicroBatch:
        """Build a micro batch of the rows' new tokens, or one that only matches other ranks'; ``index``: adapters', ascending."""
        tokens = [row.tokens[-1] for row in rows] or [0]
        batch = next_tokens(
            tokens,
            [row.length - 1 for row in rows] or [0],
            list(index) or [0],
            self._engine.device,
            multiple=self._engine.layout.token_multiple,
            cached=growing,
        )
        samples = [Sample([token], [token], [0.0]) for token in tokens]
        self._engine.trainable.prepare(batch, samples, self._order)
        return batch
