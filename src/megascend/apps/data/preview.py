"""Summarize data for a person before training: counts and lengths, and a sample as text, by loss weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from megascend.apps.data.store import Samples
from megascend.training.batch.sample import Sample


@dataclass(frozen=True)
class SampleStatistics:
    """Figures of some samples, both sides of pairs counted; lengths are in tokens, ``supervised`` have a weight in the loss."""

    samples: int
    tokens: int
    supervised: int
    shortest: int
    median: int
    mean: float
    p95: int
    longest: int
    members: int = 1
    unit: str = "samples"

    @classmethod
    def of(cls, part: Samples) -> SampleStatistics:
        """Compute the figures of at least one sample. Reads the weights of all."""
        lengths = part.lengths
        median, p95 = np.percentile(lengths, [50, 95], method="higher")
        return cls(
            samples=len(lengths),
            tokens=int(lengths.sum()),
            supervised=int(part.supervised.sum()),
            shortest=int(lengths.min()),
            median=int(median),
            mean=float(lengths.mean()),
            p95=int(p95),
            longest=int(lengths.max()),
            members=part.members,
            unit=part.unit,
        )


@dataclass(frozen=True)
class SourceStatistics:
    """Figures of one source of training data.

    Attributes:
        kinds: number of documents of each kind, held-out ones included.
        histogram: number of samples by their longest length, a power of two, in tokens; all between the first and the last.
    """

    name: str
    kinds: dict[str, int]
    histogram: dict[int, int]

    @classmethod
    def measure(cls, name: str, kinds: dict[str, int], part: Samples) -> SourceStatistics:
        """Count the lengths of at least one sample."""
        edges = [1 << (int(length) - 1).bit_length() for length in part.lengths]
        first, last = min(edges).bit_length(), max(edges).bit_length()
        return cls(name, kinds, {1 << bit: edges.count(1 << bit) for bit in range(first - 1, last)})


Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


@dataclass(frozen=True)
class SamplePiece:
    """Neighbouring tokens of one loss weight, as text, and their number."""

    text: str
    weight: float
    tokens: int


def pieces(sample: Sample, decode: Decode, *, scored: bool = False) -> list[SamplePiece]:
    """Return the tokens read and predicted, in order, by weight; the first, which nothing predicts, has weight 0.

    A character whose tokens differ in weight shows as the replacement character in each piece. Of a sample for a scalar head
    (``scored``), tokens are read only.
    """
    ids, weights = sample.input_ids.tolist(), sample.weights.tolist()
    if not scored:
        ids, weights = [ids[0], *sample.target_ids.tolist()], [0.0, *weights]
    result, start, before = [], 0, ""
    for weight, members in groupby(weights):
        count = len(list(members))
        # Decoded together with all tokens before: some tokenizers drop a leading space from the first token of a text.
        upto = decode(ids[: start + count])
        text = upto[len(before) :] if upto.startswith(before) else decode(ids[start : start + count])
        result.append(SamplePiece(text, weight, count))
        start, before = start + count, upto
    return result
