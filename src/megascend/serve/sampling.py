"""Requests to sample that are being answered, a slice of tokens at a time, so that training goes on between two slices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from megascend.errors import ConfigError
from megascend.sampling.request import SampleRequest, SampleResult
from megascend.serve.commands import Outcome, Respond

SAMPLES_AT_ONCE = 64
"""Responses that are sampled together."""
SLICE_TOKENS = 16
"""Tokens of each of them that are sampled between two units of training."""

Cancelled = Callable[[], Collection[int]]
"""Numbers of the requests that nobody waits for any more."""

Generate = Callable[[Sequence[SampleRequest], int, Cancelled], Iterator[Mapping[int, SampleResult]]]
"""Answers requests, so many tokens at a time; after each slice the results of those that have ended. Collective."""

CANCELLED = ConfigError("the client has cancelled this request")


class Sampling:
    """Requests that are sampled together, until all are answered."""

    def __init__(self, commands: Sequence[Respond], generate: Generate) -> None:
        self._left = dict(enumerate(commands))
        self._cancelled: set[int] = set()
        self._slices = generate([command.request for command in commands], SLICE_TOKENS, lambda: self._cancelled)

    @property
    def left(self) -> list[Respond]:
        """Those that have no answer yet."""
        return list(self._left.values())

    def advance(self) -> list[Outcome]:
        """Sample a slice. Collective."""
        ended = next(self._slices)
        return [self._outcome(number, result) for number, result in ended.items()]

    def cancel(self, of: int) -> None:
        """End the request of the command with this number at the next token."""
        self._cancelled |= {number for number, command in self._left.items() if command.number == of}

    def _outcome(self, number: int, result: SampleResult) -> Outcome:
        command = self._left.pop(number)
        return (
            Outcome(command.number, error=CANCELLED) if number in self._cancelled else Outcome(command.number, result)
        )
