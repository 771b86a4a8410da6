"""Split the tensors of a manifest into buckets. Pure, no torch.

The bytes of all tensors are concatenated, without gaps, in the manifest's order; a bucket is the next ``bucket_bytes`` of them.
So a tensor may begin in one bucket and end in another, and only payload is sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weightwire.manifest import TensorSpec


@dataclass(frozen=True)
class Piece:
    """Slice of a tensor: ``length`` bytes from ``offset``, at ``position`` in the bucket.

    Attributes:
        tensor: its index in the manifest.
    """

    tensor: int
    offset: int
    position: int
    length: int


@dataclass(frozen=True)
class Bucket:
    """Bytes ``start`` to ``stop`` of the concatenated tensors, and the tensors' pieces in them."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


def offsets(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return the start of each tensor in the concatenated bytes, and the end of the last one."""
    return tuple(accumulate((spec.nbytes for spec in specs), initial=0))


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Split the tensors into buckets of ``bucket_bytes``; the last one may be smaller. Empty if there are no bytes.

    Empty tensors are in no bucket.
    """
    starts = offsets(specs)
    total = starts[-1]
    buckets = []
    for index, start in enumerate(range(0, total, bucket_bytes)):
        stop = min(start + bucket_bytes, total)
        pieces = []
        # The last tensor that starts at or before the bucket. Of several with one start, all but the last are empty.
        tensor = bisect_right(starts, start) - 1
        while tensor < len(specs) and starts[tensor] < stop:
            first, last = max(starts[tensor], start), min(starts[tensor + 1], stop)
            # Empty tensors have no piece.
            if last > first:
                pieces.append(Piece(tensor, first - starts[tensor], first - start, last - first))
            tensor += 1
        buckets.append(Bucket(index, start, stop, tuple(pieces)))
    return tuple(buckets)
