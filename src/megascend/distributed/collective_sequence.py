"""Who came, told through the store: works when collectives do not, which is when it is needed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from megascend.distributed.deadlock import Standing
from megascend.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store


class CollectiveSequence:
    """One entry a rank, in a store all ranks share: how many collectives of every place it has entered, and which last.

    A rank announces that it is about to enter the n-th collective of a place (``"dp_cp"``, ``"start"``); when a
    collective fails, the ranks whose count is behind are those that did not come. One small write a collective.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._counts: dict[str, int] = {}
        self._last = ""
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    def announce(self, place: str, *, waits: bool = True) -> int:
        """Say that this rank enters its next collective of ``place``; returns the collective's number, from 1.

        Args:
            waits: this thread does not go on before the collective has ended.
        """
        with self._lock:
            count = self._counts[place] = self._counts.get(place, 0) + 1
            if waits and threading.get_ident() == self._thread:  # a thread in the background holds up nobody else
                self._last = place
            self._store.set(_key(self._rank), json.dumps([self._last, self._counts]))
        return count

    def count(self, place: str) -> int:
        """Collectives of ``place`` that this rank has entered."""
        return self._counts.get(place, 0)

    def standings(self, ranks: Sequence[int]) -> dict[int, Standing]:
        """What ``ranks`` have announced so far. Does not wait."""
        found = {}
        for rank in ranks:
            last, counts = "", {}
            if self._store.check([_key(rank)]):
                last, counts = json.loads(self._store.get(_key(rank)))
            found[rank] = Standing(counts, last)
        return found

    def missing(self, place: str, count: int, ranks: Iterable[int]) -> list[int]:
        """Which of ``ranks`` have not announced number ``count`` yet. Does not wait."""
        return [rank for rank, standing in self.standings([*ranks]).items() if standing.counts.get(place, 0) < count]

    def wait(self, place: str, count: int, ranks: Iterable[int], timeout_s: float, label: str) -> None:
        """Wait until all ``ranks`` have announced number ``count``.

        Raises:
            CollectiveTimeoutError: some did not within ``timeout_s``; the message names them.
        """
        ranks = list(ranks)
        deadline = time.monotonic() + timeout_s
        while late := self.missing(place, count, ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectiveTimeoutError(did_not_arrive(self._rank, label, late, len(ranks), timeout_s))
            self._doze(_key(late[0]), min(left, 1.0))

    def _doze(self, key: str, seconds: float) -> None:
        """Sleep until the key exists (woken by the store) or, where it exists already, for a moment."""
        if self._store.check([key]):
            time.sleep(min(seconds, 0.02))
            return
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # which class a timeout has differs from store to store
            return  # the caller looks at the clock, and a store that is gone fails its next check


def did_not_arrive(rank: int, label: str, late: list[int], expected: int, timeout_s: float) -> str:
    """The message of every error about ranks that did not come."""
    names = ", ".join(str(number) for number in late)
    return (
        f"rank {rank}: {len(late)} of {expected} ranks did not arrive at {label} within {timeout_s:g} s: "
        f"{'rank' if len(late) == 1 else 'ranks'} {names}. Look at the first error in their logs; if they are only "
        "slow, raise timeout_s"
    )


def _key(rank: int) -> str:
    return f"arrived/{rank}"
