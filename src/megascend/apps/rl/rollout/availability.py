"""Recent failures of engines, so that requests go to others first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

FIRST_S = 5.0
"""Seconds for which an engine is left out after a failure; doubled by each further one in a row."""
LONGEST_S = 60.0


class Availability:
    """Circuit breaker for engines, which are identified by their index.

    An engine that fails is left out for a bounded time. After that it is on trial: it gets one request at a time, until one
    succeeds.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_a_row, self._until = [0] * count, [0.0] * count

    def failed(self, index: int) -> float | None:
        """Record a failure; return the seconds for which the engine is left out, None if it already was."""
        # Requests that were under way when the engine failed fail as well: they are no further evidence.
        if self.left_out(index):
            return None
        self._in_a_row[index] += 1
        seconds = min(LONGEST_S, FIRST_S * 2.0 ** min(self._in_a_row[index] - 1, 10))
        self._until[index] = self._clock() + seconds
        return seconds

    def succeeded(self, index: int) -> bool:
        """Record a success; return whether the engine had failed before."""
        had_failed, self._in_a_row[index] = self._in_a_row[index] > 0, 0
        return had_failed

    def doubtful(self, index: int) -> bool:
        """Check whether an engine failed at its last request."""
        return self._in_a_row[index] > 0

    def left_out(self, index: int) -> bool:
        """Check whether an engine is left out, to be used only if there is no other."""
        return self.doubtful(index) and self._clock() < self._until[index]

    def best(self, among: Sequence[int], busy: Sequence[int]) -> int:
        """Return the least busy engine that is not left out; if all are, the one whose time ends first."""
        # An engine on trial gets one request: if it fails again, one prompt has waited for it and not many.
        ready = [index for index in among if not self.doubtful(index) or not (self.left_out(index) or busy[index])]
        if ready:
            return min(ready, key=lambda index: busy[index])
        # All are left out: the one whose time ends first is the likeliest to be back.
        return min(among, key=lambda index: (self._until[index], busy[index]))
