"""How the tensors of a manifest are cut into buckets. Pure, no torch.

The bytes of all tensors stand one after the other, without gaps, in the manifest's order; a bucket is the next ``bucket_bytes``
of them. So a tensor may begin in one bucket and end in another, and nothing but payload travels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weightwire.manifest import TensorSpec


@dataclass(frozen=True)
class Piece:
    """``length`` bytes of a tensor, from ``offset`` on, at ``position`` in the bucket.

    Attributes:
        tensor: its place in the manifest.
    """

    tensor: int
    offset: int
    position: int
    length: int


@dataclass(frozen=True)
class Bucket:
    """Bytes ``start`` to ``stop`` of all, and whose they are."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


def offsets(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Where each tensor begins among the bytes of all, and where the last one ends."""
    return tuple(accumulate((spec.nbytes for spec in specs), initial=0))


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut the tensors into buckets of ``bucket_bytes``; the last one may be smaller. None if there are no bytes.

    Empty tensors are in no bucket.
    """
    begins = offsets(specs)
    total = begins[-1]
    buckets = []
    for index, start in enumerate(range(0, total, bucket_bytes)):
        stop = min(start + bucket_bytes, total)
        pieces = []
        tensor = bisect_right(begins, start) - 1
        while tensor < len(specs) and begins[tensor] < stop:
            first, last = max(begins[tensor], start), min(begins[tensor + 1], stop)
            if last > first:
                pieces.append(Piece(tensor, first - begins[tensor], first - start, last - first))
            tensor += 1
        buckets.append(Bucket(index, start, stop, tuple(pieces)))
    return tuple(buckets)
