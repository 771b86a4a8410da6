"""Sizes of captured steps, and padding of micro batches to them. Pure: plain numbers in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from megascend.training.batch.packing import round_up

StepKind = Literal["cross_entropy", "logprobs", "forward", "hidden"]
"""Forward and backward of the built-in cross entropy; of any other loss, which runs between the two; forward only; hidden
states only."""

SMALLEST, STEPS_PER_OCTAVE = 128, 4
"""cuDNN before 9.15.1 reads out of bounds when it replays a backward pass of attention whose number of keys is
not a multiple of 128 (release notes of cudnn-frontend 1.16.0). On an H200, 320 tokens ended with an illegal memory access."""


@dataclass(frozen=True)
class StepShape:
    """Sizes that determine a micro batch's kernels and their arguments.

    Attributes:
        kind: forward, or forward and backward.
        tokens: tokens in the micro batch, padding included.
        rows: rows of the batch; above 1, samples of one length, unpacked and without padding.
        samples: segments of attention, one of which holds the padding; 0: one sample in each row, followed by the padding.
        longest: most tokens of a segment.
        adapters: number of adapters in the stack; 0: the model without adapters.
        rank: rank that the adapters are padded to.
        entropy: also compute the entropy of the predicted distributions.
    """

    kind: StepKind
    tokens: int
    rows: int
    samples: int
    longest: int
    adapters: int
    rank: int
    entropy: bool


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value``, which is at least 1."""
    return 1 << (value - 1).bit_length()


def token_bucket(tokens: int) -> int:
    """Return the padded size for ``tokens``: multiples of 128, from 512 on four sizes per power of two."""
    step = max(SMALLEST, next_power_of_two(tokens) // (2 * STEPS_PER_OCTAVE))
    return round_up(tokens, step)


def step_shape(
    kind: StepKind, lengths: Sequence[int], *, rows: int = 0, adapters: int, rank: int, entropy: bool = False
) -> StepShape:
    """Return the shape for samples of ``lengths`` tokens. Shapes are few, since each is captured.

    ``rows``: of the micro batch, 0 if packed. Attention of rows is faster than of segments, so rows whose length needs no padding
    stay rows, unless their tokens belong to several adapters. ``adapters``, ``rank``: of the stack; 0 without.
    """
    tokens = sum(lengths)
    total = token_bucket(tokens)
    if len(lengths) == 1:
        return StepShape(kind, total, 1, 0, total, adapters, rank, entropy)
    if rows > 1 and token_bucket(lengths[0]) == lengths[0] and adapters <= 1:
        return StepShape(kind, tokens, rows, 0, lengths[0], adapters, rank, entropy)
    # At most about one sample per adapter is usual: the number of adapters then determines the shape.
    samples = max(next_power_of_two(len(lengths) + 1), 2 * adapters)
    least, longest = max(*lengths, total - tokens), total
    # The longest segment is an argument of captured kernels: powers of 4 keep the number of shapes small.
    while longest % 4 == 0 and longest // 4 >= least:
        longest //= 4
    return StepShape(kind, total, 1, samples, longest, adapters, rank, entropy)


def boundaries(lengths: Sequence[int], shape: StepShape) -> list[int]:
    """Return the starts of attention segments, and the end: samples, padding, and empty ones up to ``shape.samples``."""
    starts = [0, *accumulate(lengths)]
    return starts + [shape.tokens] * (shape.samples + 1 - len(starts))


def adapter_ends(counts: Sequence[int], shape: StepShape) -> list[int]:
    """Return the end of each adapter's ``counts`` tokens; the padding belongs to the last adapter with tokens.

    Every token must belong to an adapter: a grouped product leaves rows outside all segments uninitialised.
    """
    ends = list(accumulate(counts))
    return [shape.tokens if end == ends[-1] else end for end in ends]
