"""Sampler of responses from the model in training, on the ranks that train it."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from megascend.apps.sampling.choice import choose, top_logprobs
from megascend.apps.sampling.decoders import CachedDecoder, Decoder, RecomputingDecoder
from megascend.apps.sampling.prompts import PromptScores, score_prompts
from megascend.apps.sampling.request import SampleRequest, SampleResult, Stop, TopLogprobs
from megascend.apps.sampling.rows import Decode, ResponseRow, batches, ends, rows_of, shares
from megascend.backend import Backend
from megascend.engines.step.step import Step
from megascend.errors import EngineError
from megascend.runtime.distributed.objects import gather_objects
from megascend.training.batch import images

Cancelled = Callable[[], Collection[int]]
"""Returns the indices of cancelled requests."""
OnToken = Callable[[int, int], None]
"""Receives a request's index and the token that was added to its response."""


@dataclass(frozen=True)
class _Token:
    """A row's next token, as the rank that chose it sends it to all ranks."""

    token: int
    logprob: float
    top: TopLogprobs
    stopped: bool


@dataclass(frozen=True)
class _PassResult:
    """A rank's results of a pass, which it sends to all ranks.

    Attributes:
        tokens: tokens by row number.
        failed: numbers of rows without a next token.
        cancelled: indices of cancelled requests.
        problem: why sampling cannot continue.
    """

    tokens: dict[int, _Token]
    failed: tuple[int, ...]
    cancelled: frozenset[int]
    problem: str | None = None


class Sampler:
    """Sampler that uses the current weights and adapters of the training model, without a second copy of it.

    Args:
        decode: token ids to text, with special tokens, on every rank; without it requests whose ``stop`` has texts are refused.
        end_tokens: token ids that end every response: the model's end of sequence.
        cache_tokens: most tokens of a batch of responses, prompts included, each counted as long as the longest may become. A
            longer request is refused. Memory of a token: see :mod:`megascend.engines.common.key_values`.
        max_rows: most responses of a batch.
        cache: keep the keys and values of earlier tokens if the engine can.
        on_token: called on rank 0 for each token as soon as it is chosen; must not raise.

    Attributes:
        cache_unsupported_reason: why the last call recomputed prompt and response for every token; None: it used a cache.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        decode: Decode | None = None,
        end_tokens: Sequence[int] = (),
        cache_tokens: int = 65536,
        max_rows: int = 256,
        cache: bool = True,
        on_token: OnToken | None = None,
    ) -> None:
        self._backend, self._engine, self._groups = backend, backend.engine, backend.groups
        self._step = Step(backend.engine)
        self._decode, self._end_tokens, self._cache_tokens = decode, tuple(end_tokens), cache_tokens
        self._max_rows, self._cache = max_rows, cache
        self._on_token = on_token if self._groups.rank == 0 else None
        self.cache_unsupported_reason: str | None = None
        coordinates, topology = self._groups.coordinates, backend.topology
        # One rank of each replica chooses: the others have the same logits, or none.
        self._chooses = (
            coordinates.tensor == 0 and coordinates.context == 0 and coordinates.pipeline == topology.pipeline - 1
        )

    def generate(self, requests: Sequence[SampleRequest], cancelled: Cancelled | None = None) -> list[SampleResult]:
        """Answer all ``requests``, in their order. Collective: every rank passes the same requests and gets the same results.

        A request that cannot be answered is refused in its ``SampleResult.error``; the others are answered.

        Args:
            cancelled: called on rank 0 before each token; responses to these requests end as they are, as ``cancelled``.

        Raises:
            OutOfStepError: on every rank: ranks passed different requests, or are in different calls.
            EngineError: on every rank: ``decode`` or ``cancelled`` raised on one.
        """
        results: dict[int, SampleResult] = {}
        for finished in self.in_slices(requests, cancelled=cancelled):
            results |= finished
        return [results[index] for index in range(len(requests))]

    @torch.no_grad()
    def in_slices(
        self, requests: Sequence[SampleRequest], tokens: int | None = None, cancelled: Cancelled | None = None
    ) -> Iterator[dict[int, SampleResult]]:
        """Yield :meth:`generate`'s results a few tokens at a time, so that other work can run in between. Slices are collective.

        Between two slices the backend may be used in any way, except for removing an adapter that is sampled from. Changes of
        weights apply from the next slice on. Keys and values of earlier tokens stay in memory in between.

        Args:
            tokens: passes of one slice, each of which adds a token to every response of a batch; None: a batch in one slice.

        Yields:
            After each slice, the results of requests that it finished, by their index.
        """
        with self._groups.monitor.phase("sample"):
            errors, seeds = self._agree(requests)
            accepted = [(index, request) for index, request in enumerate(requests) if errors[index] is None]
            prompts = score_prompts(self._backend, self._step, accepted, seeds)
        rows = rows_of(accepted, seeds)
        pending: dict[int, list[ResponseRow]] = {index: [] for index, _ in accepted}
        for row in rows:
            pending[row.request_index].append(row)
        yield {index: SampleResult(error=error) for index, error in enumerate(errors) if error is not None}
        get_cancelled, all_cancelled = cancelled or (lambda: ()), set[int]()
        # A pass has one token of each row, and a micro batch at most ``budget`` tokens.
        max_rows = min(self._max_rows, self._engine.batching.budget)
        for batch in batches(rows, self._cache_tokens, max_rows):
            for _ in self._sample(batch, get_cancelled, all_cancelled, tokens):
                finished = [index for index, rows in pending.items() if all(row.reason is not None for row in rows)]
                yield {index: _result(pending.pop(index), prompts.get(index)) for index in finished}
        yield {index: _result(rows, prompts.get(index)) for index, rows in pending.items()}

    def _agree(self, requests: Sequence[SampleRequest]) -> tuple[list[str | None], list[int]]:
        """Return the requests' refusals and seeds, the same on all ranks."""
        refusals = [self._refusal(request) for request in requests]
        # Not from torch's generators: sampling must not change the random state of training.
        seeds = [
            secrets.randbits(63) if refusal or request.params.seed is None else request.params.seed
            for refusal, request in zip(refusals, requests, strict=True)
        ]
        # Ranks compare a digest: prompts may be long.
        digest = hashlib.sha256(repr(list(requests)).encode()).hexdigest()[:16]
        call = f"generate({len(requests)} requests, {digest}){self._engine.trainable.describe()}"
        cache_unsupported_reason = self._engine.cache_unsupported_reason() if self._cache else "Sampler(cache=False)"
        reports = gather_objects((refusals, seeds, cache_unsupported_reason), "world", self._groups, call)
        # Decoders are collective: if one rank cannot cache, none does.
        self.cache_unsupported_reason = next((reason for *_, reason in reports if reason is not None), None)
        by_request = zip(*(report[0] for report in reports), strict=True)
        # Random seeds differ between ranks: all take rank 0's.
        return [next((refusal for refusal in by_rank if refusal), None) for by_rank in by_request], reports[0][1]

    def _refusal(self, request: SampleRequest) -> str | None:
        engine = self._engine
        if not isinstance(request, SampleRequest):
            return f"megascend.SampleRequest is expected, got {type(request).__name__}"
        if request.problem is not None:
            return request.problem
        if self._decode is None and any(isinstance(stop, str) for stop in request.params.stop):
            return "stop: this sampler has no tokenizer for texts; pass token ids"
        budget = engine.batching.budget
        limits = [
            (engine.max_length, "the model's context, or batching.max_length"),
            # Prompts are scored and recomputed in padded micro batches.
            (budget - budget % engine.layout.padded_length(1), "batching.micro_batch_tokens"),
            (self._cache_tokens, "the sampler's cache_tokens"),
        ]
        limit, setting = min(limits, key=lambda entry: entry[0])
        problem = images.problem(torch.tensor(request.prompt), request.images, engine.info.image_layout)
        if problem is not None:
            return f"the prompt {problem}"
        return request.refusal(engine.trainable.adapters, self._backend.vocab_size, limit, setting)

    # --- one batch ---

    def _sample(
        self, batch: Sequence[ResponseRow], get_cancelled: Cancelled, all_cancelled: set[int], tokens: int | None
    ) -> Iterator[None]:
        """Sample all rows of a batch to their ends, in place, ``tokens`` passes at a time; updates ``all_cancelled``."""
        share = shares(batch, self._backend.topology.data)[self._groups.coordinates.data]
        # All ranks keep the state of all rows, so that they agree on when a batch ends.
        by_number = {row.number: row for row in batch}
        _cancel(batch, all_cancelled)
        decoder: Decoder
        if self.cache_unsupported_reason is not None:
            decoder = RecomputingDecoder(self._step)
        else:
            decoder = CachedDecoder(self._step, self._engine, batch)
        while any(row.reason is None for row in batch):
            with self._groups.monitor.phase("sample"), decoder:
                for _ in count() if tokens is None else range(tokens):
                    self._add_token(share, by_number, decoder, get_cancelled, all_cancelled)
                    _cancel(batch, all_cancelled)
                    if all(row.reason is not None for row in batch):
                        break
            yield

    def _add_token(
        self,
        share: Sequence[ResponseRow],
        by_number: Mapping[int, ResponseRow],
        decoder: Decoder,
        get_cancelled: Cancelled,
        all_cancelled: set[int],
    ) -> None:
        """Add the next token to all rows of a batch that have not ended."""
        open_rows = [row for row in share if row.reason is None]
        local = self._pass_result(open_rows, decoder.logits(open_rows), get_cancelled)
        for result in gather_objects(local, "world", self._groups, "the next tokens"):
            if result.problem is not None:
                raise EngineError(f"sampling: {result.problem}")
            for number, token in result.tokens.items():
                by_number[number].add(token.token, token.logprob, token.top, stopped=token.stopped)
                if self._on_token is not None:
                    self._on_token(by_number[number].request_index, token.token)
                layout = self._engine.info.image_layout
                if layout is not None and token.token == layout.token:
                    by_number[number].fail(f"the model sampled token {token.token}, which stands for an image")
            for number in result.failed:
                by_number[number].fail("the model's logits are not finite")
            all_cancelled |= result.cancelled

    def _pass_result(self, rows: Sequence[ResponseRow], logits: Tensor | None, get_cancelled: Cancelled) -> _PassResult:
        """Build this rank's result of a pass. Never raises: all ranks wait for it in a collective."""
        try:
            cancelled = frozenset(get_cancelled()) if self._groups.rank == 0 else frozenset()
            if logits is None or not self._chooses:
                return _PassResult({}, (), cancelled)
            # A row of NaN must not end the other rows.
            finite = logits.isfinite().all(-1).tolist()
            failed = tuple(row.number for row, is_finite in zip(rows, finite, strict=True) if not is_finite)
            return _PassResult(self._choose(rows, logits, finite), failed, cancelled)
        except Exception as error:
            # Only a message reaches the other ranks; the traceback is logged here.
            logging.getLogger(__name__).exception("sampling failed on rank %d", self._groups.rank)
            return _PassResult({}, (), frozenset(), f"rank {self._groups.rank}: {type(error).__name__}: {error}")

    def _choose(self, rows: Sequence[ResponseRow], logits: Tensor, finite: Sequence[bool]) -> dict[int, _Token]:
        """Choose the next token of every row with finite logits, by the row's number."""
        if self._engine.device.type == "cuda":  # fp64 is fast there; decoders return logits on the CPU
            logits = logits.to(self._engine.device)
        choices = choose(logits, [row.draw for row in rows])
        largest = max((row.request.topk_logprobs for row in rows), default=0)
        ids, values = top_logprobs(logits, largest) if largest else (None, None)
        tokens = {}
        for index, (row, token, logprob) in enumerate(zip(rows, choices.tokens, choices.logprobs, strict=True)):
            if not finite[index]:
                continue
            top: TopLogprobs = ()
            if ids is not None and values is not None and (k := row.request.topk_logprobs):
                top = tuple(zip(ids[index, :k].tolist(), values[index, :k].tolist(), strict=True))
            stops: tuple[Stop, ...] = (*self._end_tokens, *row.request.params.stop)
            tokens[row.number] = _Token(token, logprob, top, ends([*row.tokens, token], stops, self._decode))
        return tokens


def _cancel(batch: Sequence[ResponseRow], cancelled: Collection[int]) -> None:
    """End rows of cancelled requests."""
    for row in batch:
        if row.reason is None and row.request_index in cancelled:
            row.reason = "cancelled"


def _result(rows: Sequence[ResponseRow], scores: PromptScores | None) -> SampleResult:
    problem = next((row.problem for row in rows if row.problem is not None), None)
    if problem is not None:
        return SampleResult(error=problem)
    scores = scores or PromptScores()
    samples = tuple(row.sequence() for row in rows)
    return SampleResult(samples, scores.logprobs, scores.top, scores.targets, scores.draws)
