"""Requests to sample that are being answered, a slice of tokens at a time, so that training goes on between two slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megascend.sampling.request import SampleRequest, SampleResult
from megascend.serve.commands import Outcome, Respond

SAMPLES_AT_ONCE = 64
"""Responses that are sampled together."""
SLICE_TOKENS = 16
"""Tokens of each of them that are sampled between two units of training."""

Generate = Callable[[Sequence[SampleRequest], int], Iterator[Mapping[int, SampleResult]]]
"""Answers requests, so many tokens at a time; after each slice the results of those that have ended. Collective."""


class Sampling:
    """Requests that are sampled together, until all are answered."""

    def __init__(self, commands: Sequence[Respond], generate: Generate) -> None:
        self._left = dict(enumerate(commands))
        self._slices = generate([command.request for command in commands], SLICE_TOKENS)

    @property
    def left(self) -> list[Respond]:
        """Those that have no answer yet."""
        return list(self._left.values())

    def advance(self) -> list[Outcome]:
        """Sample a slice. Collective."""
        ended = next(self._slices)
        return [Outcome(self._left.pop(number).number, result) for number, result in ended.items()]
