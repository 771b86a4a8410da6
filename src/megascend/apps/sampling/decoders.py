"""Decoders: next-token logits by a full forward pass, on any engine and layout, or with a KV cache."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from megascend.apps.sampling.request import SampleRequest
from megascend.apps.sampling.rows import ResponseRow
from megascend.engines.base import Engine, Output
from megascend.engines.common.key_values import DecodeStep, KeyValues, Prefill
from megascend.engines.step.step import Step
from megascend.training.batch.images import SampleImages, positions
from megascend.training.batch.micro_batch import MicroBatch, next_tokens
from megascend.training.batch.sample import Sample


class Decoder(AbstractContextManager["Decoder"], ABC):
    """Next-token logits for the rows of one batch.

    A context manager that all ranks enter for every slice of tokens; between slices the model is free for other work.
    """

    @abstractmethod
    def logits(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        """Return next-token logits fp32 [rows, vocabulary] on the CPU, after each row's prompt and response so far. Collective.

        None on pipeline stages before the last, and without rows.

        Args:
            rows: this data parallel rank's unfinished rows; may be empty. Between two calls every row gets one more token and
                finished rows are dropped; none is added, and the order stays.
        """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing by default."""


class RecomputingDecoder(Decoder):
    """Decoder without a cache: computes prompt and response again for every token."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def logits(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        samples = [sample_of(row) for row in rows]
        logits = self._step.next_token_logits(samples, everywhere=False)
        return torch.stack(logits) if logits else None


def sample_of(row: ResponseRow) -> Sample:
    """Build a sample of prompt and response so far, with weight 0 everywhere."""
    tokens = [*row.request.prompt, *row.tokens]
    return Sample(tokens, tokens, [0.0] * len(tokens), adapter=row.request.adapter, images=row.request.images)


class CachedDecoder(Decoder):
    """Decoder with a KV cache: computes a prompt once, for all of its responses.

    Args:
        batch: all rows, of all data parallel ranks.
    """

    def __init__(self, step: Step, engine: Engine, batch: Sequence[ResponseRow]) -> None:
        self._step, self._engine = step, engine
        # Adapters of all data parallel ranks' rows: activating them must be the same everywhere.
        self._order = sorted({row.request.adapter or "" for row in batch})
        self._longest = max(row.longest for row in batch)
        self._cache: KeyValues | None = None
        self._numbers: list[int] = []  # of the rows in the cache
        self._shifts: dict[int, int] = {}  # by request: position of a response's token minus its index
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._engine.caching())
        if self._cache is not None:  # else _start() does, after next_token_logits(), which enters its own contexts
            self._evaluate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def logits(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        return self._start(rows) if self._cache is None else self._continue(rows, self._cache)

    def _start(self, rows: Sequence[ResponseRow]) -> Tensor | None:
        """Compute the prompts, filling the cache."""
        # Responses to one prompt share its prefill.
        prompts = {row.request_index: row for row in rows}
        self._shifts = {index: self._shift(row.request) for index, row in prompts.items()}
        samples = [sample_of(row) for row in prompts.values()]
        self._cache = cache = KeyValues(len(samples), self._longest, self._engine.device)

        def fill_cache(batch: MicroBatch) -> None:
            batch.cached = Prefill(cache, tuple(batch.members), tuple(batch.lengths), tuple(batch.padded_lengths))

        logits = self._step.next_token_logits(samples, everywhere=False, on_batch=fill_cache)
        prompt_index = {request_index: index for index, request_index in enumerate(prompts)}
        selection = [prompt_index[row.request_index] for row in rows]  # a prompt's row, once for every response
        # From a row for each prompt to one for each response.
        cache.take(selection)
        self._numbers = [row.number for row in rows]
        self._evaluate()
        return torch.stack(logits)[selection] if logits else None

    def _shift(self, request: SampleRequest) -> int:
        """Return the difference of positions and indices of a response's tokens: images take fewer positions than tokens."""
        layout = self._engine.info.image_layout
        if layout is None or not isinstance(request.images, SampleImages):
            return 0
        # -1 is not a token, and so not an image's.
        following = positions(torch.tensor([*request.prompt, -1]), request.images.grids, layout)[0, -1]
        return int(following) - len(request.prompt)

    def _evaluate(self) -> None:
        """Disable dropout and activate the rows' adapters until the context is left."""
        self._open.enter_context(self._engine.evaluating())
        self._open.enter_context(self._engine.trainable.applying(self._order))

    def _continue(self, rows: Sequence[ResponseRow], cache: KeyValues) -> Tensor | None:
        """Compute the newest token of every row."""
        index = [self._order.index(row.request.adapter or "") for row in rows]
        order = sorted(range(len(rows)), key=lambda row: index[row])  # layers need tokens sorted by adapter
        cache_index = {number: position for position, number in enumerate(self._numbers)}
        cache.take([cache_index[rows[row].number] for row in order])
        self._numbers = [rows[row].number for row in order]
        stages = self._engine.topology.pipeline
        parts = torch.arange(len(rows)).tensor_split(stages)  # a micro batch per stage fills the pipeline
        batches = []
        for part in parts:
            members = order[part[0] : part[-1] + 1] if len(part) else []
            decode_step = DecodeStep(cache, slice(int(part[0]), int(part[-1]) + 1)) if members else None
            part_rows = [rows[member] for member in members]
            batches.append(self._batch(part_rows, [index[member] for member in members], decode_step))

        def scores(batch: MicroBatch, output: Output) -> tuple[Tensor, Tensor]:
            return batch.weights.sum(), output.logits(torch.arange(int((~batch.padding).sum()) if batch.cached else 0))

        # Without rows this rank only joins the model's collectives.
        if rows:
            cache.begin()
        stored = self._engine.run(batches, scores, forward_only=True)
        cache.advance()
        return torch.cat(stored)[torch.tensor(order).argsort()] if rows and stored else None

    def _batch(self, rows: Sequence[ResponseRow], index: Sequence[int], decode_step: DecodeStep | None) -> MicroBatch:
        """Build a micro batch of the rows' new tokens, or one that only matches other ranks'; ``index``: adapters', ascending."""
        tokens = [row.tokens[-1] for row in rows] or [0]
        batch = next_tokens(
            tokens,
            [row.length - 1 + self._shifts[row.request_index] for row in rows] or [0],
            list(index) or [0],
            self._engine.device,
            multiple=self._engine.layout.token_multiple,
            cached=decode_step,
            spatial=self._engine.info.image_layout is not None,
        )
        samples = [Sample([token], [token], [0.0]) for token in tokens]
        self._engine.trainable.prepare(batch, samples, self._order)
        return batch
