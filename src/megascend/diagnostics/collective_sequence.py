"""Which object collectives a rank has entered: numbers in its record, by which the others find out who has not come."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CollectiveCounts:
    """How far a rank is.

    Attributes:
        entered: collectives that it has entered, by the name of their channel (``"dp_cp"``).
        last: the channel of the last one that its main thread waits in, or has waited in; the collective's number is the count.
    """

    entered: Mapping[str, int] = field(default_factory=dict)
    last: str = ""

    def of(self, channel: str) -> int:
        """Collectives of ``channel`` that the rank has entered."""
        return self.entered.get(channel, 0)


class CollectiveSequence:
    """Numbers the collectives of every channel, from 1. Made on the main thread; any thread may enter one.

    Attributes:
        counts: those of this moment; never changed in place.
    """

    def __init__(self) -> None:
        self.counts = CollectiveCounts()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    def enter(self, channel: str, *, waits: bool = True) -> int:
        """Take note that this rank enters its next collective of ``channel``; returns the collective's number.

        Args:
            waits: this thread does nothing else before the collective has ended.
        """
        with self._lock:
            number = self.counts.of(channel) + 1
            # A thread in the background holds up nobody else.
            last = channel if waits and threading.get_ident() == self._thread else self.counts.last
            self.counts = CollectiveCounts({**self.counts.entered, channel: number}, last)
        return number
