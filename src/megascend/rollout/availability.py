"""Which of several engines failed a short time ago, so that others are asked first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

FIRST_S = 5.0
"""How long an engine is left out after a failure; twice as long after each further one in a row."""
LONGEST_S = 60.0


class Availability:
    """Remembers failures of engines, which are known by their numbers.

    An engine that fails is left out for a bounded time. After that it is on trial: it gets one request at a time, until one
    succeeds.

    Args:
        count: of engines.
        clock: seconds, monotonic.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_a_row, self._until = [0] * count, [0.0] * count

    def failed(self, which: int) -> float | None:
        """An engine has failed: for how many seconds it is left out; None if it is already."""
        if self.left_out(which):
            return None
        self._in_a_row[which] += 1
        seconds = min(LONGEST_S, FIRST_S * 2.0 ** min(self._in_a_row[which] - 1, 10))
        self._until[which] = self._clock() + seconds
        return seconds

    def answered(self, which: int) -> bool:
        """An engine has answered; whether it had failed before that."""
        had_failed, self._in_a_row[which] = self._in_a_row[which] > 0, 0
        return had_failed

    def doubtful(self, which: int) -> bool:
        """Whether it failed when it was asked last."""
        return self._in_a_row[which] > 0

    def left_out(self, which: int) -> bool:
        """Whether it is asked only if there is no other."""
        return self.doubtful(which) and self._clock() < self._until[which]

    def best(self, among: Sequence[int], busy: Sequence[int]) -> int:
        """The least busy engine that is not left out; if all are, the one whose time is over first.

        Args:
            among: engines to choose from, at least one.
            busy: how much each engine has to do, by its number.
        """
        ready = [each for each in among if not self.doubtful(each) or not (self.left_out(each) or busy[each])]
        if ready:
            return min(ready, key=lambda each: busy[each])
        return min(among, key=lambda each: (self._until[each], busy[each]))
