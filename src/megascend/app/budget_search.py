"""The largest token budget whose steps fit into memory, from the peaks of a few trials. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

STEP = 256
"""Budgets are multiples of this, except for the smallest."""
WORTH = 1.1
"""A further trial has to promise this factor."""
TRIALS = 6


@dataclass
class BudgetSearch:
    """One rank's view of the search; ranks agree on what is tried and on whether it fitted.

    Peaks grow with the tokens of a micro batch along a line whose constant part is at least what was there before: a line from
    there through the first trial can only promise too little. Later trials are extrapolated from the last two that fitted.

    Attributes:
        smallest: what has to fit, tokens of the longest sample (or pair) with its padding.
        largest: what a step can use.
        limit: bytes that a peak may have.
        before: bytes that are there without a step.
    """

    smallest: int
    largest: int
    limit: float
    before: float
    fitted: list[tuple[int, float]] = field(default_factory=list)
    failed: list[tuple[int, float]] = field(default_factory=list)

    def first(self, usual: int) -> int:
        """What to try first: ``usual`` tokens, unless samples are longer or steps smaller."""
        return max(self.smallest, min(usual, self.largest))

    def add(self, tokens: int, peak: float, fits: bool) -> None:
        """Take the peak of a trial (infinite if memory ran out), and whether it fitted on all ranks."""
        (self.fitted if fits else self.failed).append((tokens, peak))

    def next(self) -> int | None:
        """What this rank would try next; None: it is content."""
        if len(self.fitted) + len(self.failed) >= TRIALS:
            return None
        if not self.fitted:
            worst, peak = min(self.failed)
            share = (self.limit - self.before) / (peak - self.before)
            return None if worst <= self.smallest else self._rounded(worst * max(0.0, min(share, 0.9)))
        (before, peak_before), (tokens, peak) = ((0, self.before), *self.fitted)[-2:]
        slope = (peak - peak_before) / (tokens - before)
        reach = self.largest
        if slope > 0:
            reach = min(reach, self._rounded(tokens + (self.limit - peak) / slope))
        if self.failed:
            reach = min(reach, self._rounded((tokens + min(self.failed)[0]) / 2))
        return reach if reach >= WORTH * tokens or (reach == self.largest > tokens) else None

    @property
    def best(self) -> int | None:
        """The largest that fitted; None: nothing did."""
        return max((tokens for tokens, _ in self.fitted), default=None)

    def _rounded(self, tokens: float) -> int:
        return max(self.smallest, int(tokens) // STEP * STEP)
