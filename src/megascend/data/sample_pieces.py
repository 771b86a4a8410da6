"""A sample as text again, in pieces of one weight: what a person has to see of it before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from megascend.batch.sample import Sample

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one weight.

    Attributes:
        weight: of each of them in the loss; 0: not learned.
        tokens: how many there are.
    """

    text: str
    weight: float
    tokens: int


def pieces(sample: Sample, decode: Decode) -> list[Piece]:
    """The tokens that the model reads and predicts, in order. The first one, which nothing predicts, has weight 0.

    Of a character whose tokens have different weights, each piece shows the replacement character for its part.
    """
    ids = [int(sample.input_ids[0]), *sample.target_ids.tolist()]
    weights = [0.0, *sample.weights.tolist()]
    found, start, before = [], 0, ""
    for weight, members in groupby(weights):
        count = len(list(members))
        # Decoded with all that is before them: alone, some tokenizers drop the space that a word begins with.
        upto = decode(ids[: start + count])
        text = upto[len(before) :] if upto.startswith(before) else decode(ids[start : start + count])
        found.append(Piece(text, weight, count))
        start, before = start + count, upto
    return found
