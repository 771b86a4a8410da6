"""How long the first request of every model waits for its turn: in units of the ranks' work, and in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Waits:
    """Counts units of work.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._units = 0
        self._began = clock()
        self._since: dict[str, tuple[int, float]] = {}

    def first(self, models: Iterable[str]) -> None:
        """These models have a request that could run now."""
        now = self._clock()
        for model in models:
            self._since.setdefault(model, (self._units, now))

    @contextmanager
    def unit(self) -> Iterator[None]:
        """A unit of work runs in the block."""
        self._began = self._clock()
        yield
        self._units += 1

    def of(self, model: str) -> tuple[int, float]:
        """Units and seconds that a model's first request has waited, as it was in the unit that has just ended."""
        units, since = self._since.pop(model)
        return self._units - 1 - units, self._began - since

    def forget(self, model: str) -> None:
        """A model is removed."""
        self._since.pop(model, None)
