"""Sizes that captured steps are made for, and how a micro batch is padded to one. Pure: plain numbers in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

StepKind = Literal["cross_entropy", "logprobs", "forward", "hidden"]
"""Forward and backward of the built-in cross entropy; of any other loss, which is computed between them; no backward; hidden
states alone."""

SMALLEST, STEPS_PER_OCTAVE = 128, 4
"""Before 9.15.1, cuDNN reads memory that is not its own when it replays a backward pass of attention whose number of keys is
not a multiple of 128 (release notes of cudnn-frontend 1.16.0). On an H200, 320 tokens ended with an illegal memory access."""


@dataclass(frozen=True)
class StepShape:
    """What decides which kernels a micro batch takes, and with what sizes.

    Attributes:
        kind: what is computed.
        tokens: of the micro batch, padding included.
        rows: above 1: samples of one length, side by side and without padding, as the micro batch came.
        samples: segments of attention, one of which holds the padding; 0: one sample in each row, which the padding follows.
        longest: no segment has more tokens than this.
        adapters: side by side; 0: the model alone.
        rank: that the adapters are padded to.
        entropy: of the predicted distributions is wanted.
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
    """Smallest power of two that is not below ``value``, which is at least 1."""
    return 1 << (value - 1).bit_length()


def token_bucket(tokens: int) -> int:
    """Tokens that a micro batch of ``tokens`` is padded to: multiples of 128, from 512 on four sizes an octave."""
    step = max(SMALLEST, next_power_of_two(tokens) // (2 * STEPS_PER_OCTAVE))
    return -(-tokens // step) * step


def step_shape(
    kind: StepKind, lengths: Sequence[int], *, rows: int = 0, adapters: int, rank: int, entropy: bool = False
) -> StepShape:
    """Return the shape for samples of ``lengths`` tokens: few shapes serve many micro batches, as each is captured.

    ``rows``: of the micro batch as it came, 0 if packed. Attention of rows is faster than of segments, so rows whose length needs
    no padding stay rows, unless their tokens belong to several adapters. ``adapters``, ``rank``: of the stack; 0 without.
    """
    tokens = sum(lengths)
    total = token_bucket(tokens)
    if len(lengths) == 1:
        return StepShape(kind, total, 1, 0, total, adapters, rank, entropy)
    if rows > 1 and token_bucket(lengths[0]) == lengths[0] and adapters <= 1:
        return StepShape(kind, tokens, rows, 0, lengths[0], adapters, rank, entropy)
    # One sample an adapter is the rule: then the number of adapters alone decides.
    samples = max(next_power_of_two(len(lengths) + 1), 2 * adapters)
    needed, longest = max(*lengths, total - tokens), total
    while longest % 4 == 0 and longest // 4 >= needed:
        longest //= 4
    return StepShape(kind, total, 1, samples, longest, adapters, rank, entropy)


def boundaries(lengths: Sequence[int], shape: StepShape) -> list[int]:
    """Where segments of attention begin, and the end: the samples, the padding, and empty ones up to ``shape.samples``."""
    starts = [0, *accumulate(lengths)]
    return starts + [shape.tokens] * (shape.samples + 1 - len(starts))


def adapter_ends(counts: Sequence[int], shape: StepShape) -> list[int]:
    """Where the tokens of each adapter end, of ``counts`` tokens each; the padding belongs to the last one that has any.

    Every token must belong to some adapter: a grouped product leaves rows that are in no segment as memory happened to be.
    """
    ends = list(accumulate(counts))
    return [shape.tokens if end == ends[-1] else end for end in ends]
