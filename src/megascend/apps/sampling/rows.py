"""Responses in progress: their ends, and the batches in which they are sampled. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megascend.apps.sampling.choice import Draw, uniform
from megascend.apps.sampling.request import SampledSequence, SampleRequest, Stop, StopReason, TopLogprobs


@dataclass
class ResponseRow:
    """A response in progress; equal on all ranks.

    Attributes:
        number: index among the call's rows.
        request_index: index of its request.
        sample: index among the request's responses.
        seed: seed of the request.
        reason: why the row has ended; None: it has not.
        problem: why it cannot continue.
    """

    number: int
    request_index: int
    request: SampleRequest
    sample: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    reason: StopReason | None = None
    problem: str | None = None

    def __post_init__(self) -> None:
        if not self.request.params.max_tokens:
            self.reason = "length"

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the response so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Most tokens that prompt and response may have."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def draw(self) -> Draw:
        """Sampling parameters and random number for the next token."""
        params = self.request.params
        # A function of seed, response and position, so that neither the batch nor the layout changes a draw.
        number = uniform(self.seed, self.sample, len(self.tokens)) if params.temperature > 0 else 0.0
        return Draw(params.temperature, number, params.top_p, params.top_k)

    def add(self, token: int, logprob: float, top: TopLogprobs, *, stopped: bool) -> None:
        """Append the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.request.topk_logprobs:
            self.top.append(top)
        if stopped:
            self.reason = "stop"
        elif len(self.tokens) >= self.request.params.max_tokens:
            self.reason = "length"

    def fail(self, problem: str) -> None:
        self.reason, self.problem = "cancelled", f"{problem} (after {len(self.tokens)} tokens)"

    def sequence(self) -> SampledSequence:
        assert self.reason is not None, "the row has not ended"
        top = tuple(self.top) if self.request.topk_logprobs else None
        return SampledSequence(tuple(self.tokens), tuple(self.logprobs), self.reason, top)


def rows_of(requests: Sequence[tuple[int, SampleRequest]], seeds: Sequence[int]) -> list[ResponseRow]:
    """Build a row for each response to ``requests``, (index, request) pairs; ``seeds``: by request index."""
    samples = [(index, request, sample) for index, request in requests for sample in range(request.num_samples)]
    return [
        ResponseRow(number, index, request, sample, seeds[index])
        for number, (index, request, sample) in enumerate(samples)
    ]


def batches(rows: Sequence[ResponseRow], budget: int, max_rows: int) -> list[list[ResponseRow]]:
    """Group rows into batches that are sampled one after the other.

    A batch has at most ``max_rows`` rows and, with all of them as long as the longest may become, at most ``budget`` tokens,
    unless it is a single row.
    """
    result: list[list[ResponseRow]] = []
    longest = 0
    for row in rows:
        longest = max(longest, row.longest)
        if result and len(result[-1]) < max_rows and longest * (len(result[-1]) + 1) <= budget:
            result[-1].append(row)
        else:
            result.append([row])
            longest = row.longest
    return result


def shares(rows: Sequence[ResponseRow], parts: int) -> list[list[ResponseRow]]:
    """Divide a batch over data parallel ranks, round robin, so that responses to one prompt are spread."""
    return [list(rows[part::parts]) for part in range(parts)]


Decode = Callable[[Sequence[int]], str]

MARGIN = 8
"""Extra tokens that are decoded before a stop text: a character that is cut at the first of them is not part of the text."""


def ends(tokens: Sequence[int], stops: Sequence[Stop], decode: Decode | None) -> bool:
    """Check whether a response's newest token completes one of ``stops``; ``decode`` is needed for texts."""
    if any(_ends(tokens, stop) for stop in stops if not isinstance(stop, str)):
        return True
    texts = [stop for stop in stops if isinstance(stop, str)]
    if not texts:
        return False
    assert decode is not None, "requests with stop texts are refused without a tokenizer"
    # A text has at most as many tokens as bytes, and earlier tokens have been checked already.
    # surrogatepass: a text from JSON may contain lone surrogates.
    window = decode(list(tokens[-(max(len(text.encode(errors="surrogatepass")) for text in texts) + MARGIN) :]))
    return any(text in window for text in texts)


def _ends(tokens: Sequence[int], stop: int | tuple[int, ...]) -> bool:
    if isinstance(stop, int):
        return bool(tokens) and tokens[-1] == stop
    return len(tokens) >= len(stop) and tuple(tokens[-len(stop) :]) == stop
