"""Responses in progress: when each ends, and in which batches they are sampled. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megascend.sampling.choice import Draw, uniform
from megascend.sampling.request import SampledSequence, SampleRequest, Stop, StopReason, TopLogprobs


@dataclass
class ResponseRow:
    """One response on its way; equal on all ranks.

    Attributes:
        number: of this row among those of the call.
        of: number of its request.
        sample: number among the request's responses.
        seed: of the request.
        reason: why the row has ended; None: it has not.
        problem: why it cannot go on.
    """

    number: int
    of: int
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
        """Tokens that there may be in the end."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def draw(self) -> Draw:
        """How the next token is chosen."""
        params = self.request.params
        number = uniform(self.seed, self.sample, len(self.tokens)) if params.temperature > 0 else 0.0
        return Draw(params.temperature, number, params.top_p, params.top_k)

    def add(self, token: int, logprob: float, top: TopLogprobs, *, stopped: bool) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.request.topk_logprobs:
            self.top.append(top)
        if stopped:
            self.reason = "stop"
        elif len(self.tokens) >= self.request.params.max_tokens:
            self.reason = "length"

    def fail(self, problem: str) -> None:
        """End without a response."""
        self.reason, self.problem = "cancelled", f"{problem} (after {len(self.tokens)} tokens)"

    def sequence(self) -> SampledSequence:
        """The finished response."""
        assert self.reason is not None, "the row is sampled to its end"
        top = tuple(self.top) if self.request.topk_logprobs else None
        return SampledSequence(tuple(self.tokens), tuple(self.logprobs), self.reason, top)


def rows_of(requests: Sequence[tuple[int, SampleRequest]], seeds: Sequence[int]) -> list[ResponseRow]:
    """A row for each response to ``requests``, (number, request) pairs; ``seeds`` are those of all numbers."""
    pairs = [(of, request, sample) for of, request in requests for sample in range(request.num_samples)]
    return [ResponseRow(number, of, request, sample, seeds[of]) for number, (of, request, sample) in enumerate(pairs)]


def batches(rows: Sequence[ResponseRow], budget: int, most: int, *, apart: bool = False) -> list[list[ResponseRow]]:
    """Rows that are sampled at a time, in their order, or, with ``apart``, those of one adapter after those of another.

    At most ``most``, and no more than ``budget`` tokens when all are as long as the longest of them may become, unless a row
    alone has more.
    """
    found: list[list[ResponseRow]] = []
    longest = 0
    ordered = sorted(rows, key=lambda row: row.request.adapter or "") if apart else rows
    for row in ordered:
        longest = max(longest, row.longest)
        same = not apart or (found and found[-1][0].request.adapter == row.request.adapter)
        if found and same and len(found[-1]) < most and longest * (len(found[-1]) + 1) <= budget:
            found[-1].append(row)
        else:
            found.append([row])
            longest = row.longest
    return found


def shares(rows: Sequence[ResponseRow], parts: int) -> list[list[ResponseRow]]:
    """Which data parallel rank samples which rows of a batch: dealt one by one, so that responses to one prompt are spread."""
    return [list(rows[part::parts]) for part in range(parts)]


Decode = Callable[[Sequence[int]], str]

MARGIN = 8
"""Tokens before those that a text can take, so that a character which is cut at the first of them is none of its own."""


def ends(tokens: Sequence[int], stops: Sequence[Stop], decode: Decode | None) -> bool:
    """Check, after every token of a response, whether the newest completes one of ``stops``; ``decode`` is needed for texts."""
    if any(_ends(tokens, stop) for stop in stops if not isinstance(stop, str)):
        return True
    texts = [stop for stop in stops if isinstance(stop, str)]
    if not texts:
        return False
    assert decode is not None, "requests with texts are refused where there is no tokenizer"
    # No text takes more tokens than it has bytes; what came before was looked at after earlier tokens.
    window = decode(list(tokens[-(max(len(text.encode(errors="surrogatepass")) for text in texts) + MARGIN) :]))
    return any(text in window for text in texts)


def _ends(tokens: Sequence[int], stop: int | tuple[int, ...]) -> bool:
    if isinstance(stop, int):
        return bool(tokens) and tokens[-1] == stop
    return len(tokens) >= len(stop) and tuple(tokens[-len(stop) :]) == stop
