"""Numbers of the object collectives that a rank has entered; its peers compare them to find the ranks that are missing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CollectiveCounts:
    """A rank's progress in its collective sequence.

    Attributes:
        entered: number of collectives entered, by the name of their channel (``"dp_cp"``).
        last: channel of the last collective that the main thread waits or waited in; the collective's number is the count.
    """

    entered: Mapping[str, int] = field(default_factory=dict)
    last: str = ""

    def of(self, channel: str) -> int:
        """Return the number of collectives of ``channel`` that the rank has entered."""
        return self.entered.get(channel, 0)


class CollectiveSequence:
    """Counter of collectives for every channel, from 1. Created on the main thread; any thread may enter a collective.

    Attributes:
        counts: the current counts; replaced as a whole, never mutated, because other threads read them without the lock.
    """

    def __init__(self) -> None:
        self.counts = CollectiveCounts()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    def enter(self, channel: str, *, waits: bool = True) -> int:
        """Record that this rank enters its next collective of ``channel``; return the collective's number.

        Args:
            waits: this thread blocks until the collective has completed.
        """
        with self._lock:
            number = self.counts.of(channel) + 1
            # Only the main thread's position matters: a background thread does not delay the other ranks.
            last = channel if waits and threading.get_ident() == self._thread else self.counts.last
            # A new object: the heartbeat's thread encodes the old one meanwhile.
            self.counts = CollectiveCounts({**self.counts.entered, channel: number}, last)
        return number
