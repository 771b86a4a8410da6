"""Responses of the model that is being trained, sampled on the ranks that train it."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from megascend.backend import Backend
from megascend.distributed.objects import gather_objects
from megascend.errors import EngineError
from megascend.sampling.choice import choose, top_logprobs
from megascend.sampling.decoders import Cached, Decoder, Recomputed
from megascend.sampling.prompts import PromptScores, score_prompts
from megascend.sampling.request import SampleRequest, SampleResult, Stop, TopLogprobs
from megascend.sampling.rows import Decode, ResponseRow, batches, ends, rows_of, shares
from megascend.step.step import Step

Cancelled = Callable[[], Collection[int]]
"""Numbers of the requests that nobody waits for any more."""


@dataclass(frozen=True)
class _Token:
    """A row's next token, as the rank that has chosen it tells all others."""

    token: int
    logprob: float
    top: TopLogprobs
    stopped: bool


@dataclass(frozen=True)
class _Told:
    """What a rank tells all others after a pass.

    Attributes:
        tokens: by the row's number.
        failed: numbers of rows without a next token.
        gone: requests that nobody waits for any more.
        problem: why sampling cannot go on.
    """

    tokens: dict[int, _Token]
    failed: tuple[int, ...]
    gone: frozenset[int]
    problem: str | None = None


class Sampler:
    """Answers requests with the weights and adapters as they are at the moment of the call; no second copy of the model is made.

    Args:
        decode: token ids to text, with special tokens, on every rank; without it requests whose ``stop`` has texts are refused.
        end_tokens: token ids that end a response whatever its request says: the model's end of sequence.
        cache_tokens: responses are sampled in batches that have at most so many tokens, prompts included, each counted as long as
            the longest may become. A longer request is refused.
        max_rows: and at most so many responses.
        cache: keep the keys and values of earlier tokens, where the engine can.

    Attributes:
        why_no_cache: of the last call: why prompt and response so far went through the model for every token; None: only what was
            new did.
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
    ) -> None:
        self._backend, self._engine, self._groups = backend, backend.engine, backend.groups
        self._step = Step(backend.engine)
        self._decode, self._end_tokens, self._cache_tokens = decode, tuple(end_tokens), cache_tokens
        self._max_rows, self._cache = max_rows, cache
        self.why_no_cache: str | None = None
        place, topology = self._groups.coordinates, backend.topology
        self._chooses = place.tensor == 0 and place.context == 0 and place.pipeline == topology.pipeline - 1

    def generate(self, requests: Sequence[SampleRequest], cancelled: Cancelled | None = None) -> list[SampleResult]:
        """Answer all ``requests``, in their order. Collective: every rank passes the same ones, and gets the same results.

        A request that cannot be answered is refused alone, in ``SampleResult.error``.

        Args:
            cancelled: asked on rank 0 before each token; responses to such requests end with what they have, as ``cancelled``.

        Raises:
            OutOfStepError: on every rank: they were given different requests, or are in different calls.
            EngineError: on every rank: ``decode`` or ``cancelled`` raised on one.
        """
        results: dict[int, SampleResult] = {}
        for ended in self.in_slices(requests, cancelled=cancelled):
            results |= ended
        return [results[of] for of in range(len(requests))]

    @torch.no_grad()
    def in_slices(
        self, requests: Sequence[SampleRequest], tokens: int | None = None, cancelled: Cancelled | None = None
    ) -> Iterator[dict[int, SampleResult]]:
        """:meth:`generate` a few tokens at a time, so that the model can do something else meanwhile. Each slice is collective.

        Between two slices anything may be done with the backend but removing an adapter that is sampled from. What is done to
        the weights of one counts from the next slice on. Keys and values of earlier tokens stay in memory meanwhile.

        Args:
            tokens: passes of one slice, each of which gives every response of a batch a token; None: a batch in one slice.

        Yields:
            After each slice, the results of requests that have ended in it, by their number.
        """
        with self._groups.monitor.phase("sample"):
            errors, seeds = self._agree(requests)
            accepted = [(of, request) for of, request in enumerate(requests) if errors[of] is None]
            prompts = score_prompts(self._backend, self._step, accepted, seeds)
        rows = rows_of(accepted, seeds)
        answers: dict[int, list[ResponseRow]] = {of: [] for of, _ in accepted}
        for row in rows:
            answers[row.of].append(row)
        yield {of: SampleResult(error=error) for of, error in enumerate(errors) if error is not None}
        ask, gone = cancelled or (lambda: ()), set[int]()
        most = min(self._max_rows, self._engine.batching.budget)
        apart = not self._engine.mixes_adapters
        for batch in batches(rows, self._cache_tokens, most, apart=apart):
            for _ in self._sample(batch, ask, gone, tokens):
                ended = [of for of, mine in answers.items() if all(row.reason is not None for row in mine)]
                yield {of: _result(answers.pop(of), prompts.get(of)) for of in ended}
        yield {of: _result(mine, prompts.get(of)) for of, mine in answers.items()}

    def _agree(self, requests: Sequence[SampleRequest]) -> tuple[list[str | None], list[int]]:
        """Why requests are refused, and their seeds, the same on all ranks."""
        mine = [self._refusal(request) for request in requests]
        seeds = [secrets.randbits(63) if request.params.seed is None else request.params.seed for request in requests]
        digest = hashlib.sha256(repr(list(requests)).encode()).hexdigest()[:16]
        what = f"generate({len(requests)} requests, {digest}){self._engine.trainable.describe()}"
        told = gather_objects((mine, seeds, self._no_cache()), "world", self._groups, what)
        self.why_no_cache = next((each for *_, each in told if each is not None), None)
        refusals = [
            next((each for each in of_ranks if each), None)
            for of_ranks in zip(*(each[0] for each in told), strict=True)
        ]
        return refusals, told[0][1]

    def _no_cache(self) -> str | None:
        return self._engine.why_no_cache() if self._cache else "Sampler(cache=False)"

    def _refusal(self, request: SampleRequest) -> str | None:
        engine = self._engine
        if self._decode is None and any(isinstance(stop, str) for stop in request.params.stop):
            return "stop: there is no tokenizer for texts; name token ids"
        budget = engine.batching.budget
        limits = [
            (engine.max_length, "the model's context, or batching.max_length"),
            (budget - budget % engine.layout.padded_length(1), "batching.micro_batch_tokens"),
            (self._cache_tokens, "the sampler's cache_tokens"),
        ]
        limit, setting = min(limits, key=lambda each: each[0])
        return request.refusal(engine.trainable.adapters, self._backend.vocab_size, limit, setting)

    # --- one batch ---

    def _sample(
        self, batch: Sequence[ResponseRow], cancelled: Cancelled, gone: set[int], tokens: int | None
    ) -> Iterator[None]:
        """Sample all rows of a batch to their ends, in place, ``tokens`` passes at a time; ``gone``: cancelled requests,
        updated.
        """
        mine = shares(batch, self._backend.topology.data)[self._groups.coordinates.data]
        by_number = {row.number: row for row in batch}
        _give_up(batch, gone)
        decoder = self._decoder(batch)
        while any(row.reason is None for row in batch):
            with self._groups.monitor.phase("sample"), decoder:
                for _ in count() if tokens is None else range(tokens):
                    self._add_token(mine, by_number, decoder, cancelled, gone)
                    _give_up(batch, gone)
                    if all(row.reason is not None for row in batch):
                        break
            yield

    def _add_token(
        self,
        mine: Sequence[ResponseRow],
        by_number: Mapping[int, ResponseRow],
        decoder: Decoder,
        cancelled: Cancelled,
        gone: set[int],
    ) -> None:
        """The next token of all rows of a batch that have not ended."""
        open_rows = [row for row in mine if row.reason is None]
        told = self._tell(open_rows, decoder.logits(open_rows), cancelled)
        for found in gather_objects(told, "world", self._groups, "the next tokens"):
            if found.problem is not None:
                raise EngineError(f"sampling: {found.problem}")
            for number, token in found.tokens.items():
                by_number[number].add(token.token, token.logprob, token.top, stopped=token.stopped)
            for number in found.failed:
                by_number[number].fail("the model's logits are not finite")
            gone |= found.gone

    def _tell(self, rows: Sequence[ResponseRow], logits: Tensor | None, cancelled: Cancelled) -> _Told:
        """What this rank tells all others after a pass. Never raises: the others wait for it."""
        try:
            gone = frozenset(cancelled()) if self._groups.rank == 0 else frozenset()
            if logits is None or not self._chooses:
                return _Told({}, (), gone)
            finite = logits.isfinite().all(-1).tolist()
            failed = tuple(row.number for row, fine in zip(rows, finite, strict=True) if not fine)
            return _Told(self._choose(rows, logits, finite), failed, gone)
        except Exception as error:
            logging.getLogger(__name__).exception("sampling failed on rank %d", self._groups.rank)
            return _Told({}, (), frozenset(), f"rank {self._groups.rank}: {type(error).__name__}: {error}")

    def _decoder(self, batch: Sequence[ResponseRow]) -> Decoder:
        if self.why_no_cache is not None:
            return Recomputed(self._step)
        return Cached(self._step, self._engine, batch)

    def _choose(self, rows: Sequence[ResponseRow], logits: Tensor, finite: Sequence[bool]) -> dict[int, _Token]:
        """The next token of every row whose logits are finite, by its number."""
        if self._engine.device.type == "cuda":  # where fp64 is fast; they come by way of the host
            logits = logits.to(self._engine.device)
        found = choose(logits, [row.draw for row in rows])
        most = max((row.request.topk_logprobs for row in rows), default=0)
        ids, values = top_logprobs(logits, most) if most else (None, None)
        chosen = {}
        for place, (row, token, logprob) in enumerate(zip(rows, found.tokens, found.logprobs, strict=True)):
            if not finite[place]:
                continue
            top: TopLogprobs = ()
            if ids is not None and values is not None and (k := row.request.topk_logprobs):
                top = tuple(zip(ids[place, :k].tolist(), values[place, :k].tolist(), strict=True))
            stops: tuple[Stop, ...] = (*self._end_tokens, *row.request.params.stop)
            chosen[row.number] = _Token(token, logprob, top, ends([*row.tokens, token], stops, self._decode))
        return chosen


def _give_up(batch: Sequence[ResponseRow], gone: Collection[int]) -> None:
    """End rows of requests that are cancelled."""
    for row in batch:
        if row.reason is None and row.of in gone:
            row.reason = "cancelled"


def _result(rows: Sequence[ResponseRow], scores: PromptScores | None) -> SampleResult:
    problem = next((row.problem for row in rows if row.problem is not None), None)
    if problem is not None:
        return SampleResult(error=problem)
    found = scores or PromptScores()
    samples = tuple(row.sequence() for row in rows)
    return SampleResult(samples, found.logprobs, found.top, found.targets, found.draws)
