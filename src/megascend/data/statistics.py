"""How many samples there are, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascend.data.split import Part


@dataclass(frozen=True)
class Statistics:
    """Figures of some samples; lengths are in tokens.

    Attributes:
        supervised: tokens that have a weight in the loss.
        p95: length that 95 % of the samples do not exceed.
    """

    samples: int
    tokens: int
    supervised: int
    shortest: int
    median: int
    mean: float
    p95: int
    longest: int

    @classmethod
    def of(cls, part: Part) -> Statistics:
        """Figures of at least one sample. Reads the weights of all."""
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
        )
