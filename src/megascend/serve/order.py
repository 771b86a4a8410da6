"""The order in which one model's requests run. Pure.

Clients number a model's requests 1, 2, ... and send several at a time, the first one not always first. A request runs when all
with smaller numbers have been handed out, and a number is handed out once: sent again, it gets the answer of the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Order(Generic[T]):
    """What has come and what is missing.

    Attributes:
        following: the number that is handed out next.
        early: requests that came before one with a smaller number.
    """

    following: int = 1
    early: dict[int, T] = field(default_factory=dict)

    def seen(self, number: int) -> bool:
        """True if this number has come before."""
        return number < self.following or number in self.early

    def offer(self, number: int, item: T) -> list[T]:
        """Take a request that has not been :meth:`seen`; those that may run now, in their order."""
        self.early[number] = item
        ready = []
        while self.following in self.early:
            ready.append(self.early.pop(self.following))
            self.following += 1
        return ready

    def missing(self) -> range:
        """Numbers that keep others waiting; empty if none does."""
        return range(self.following, min(self.early)) if self.early else range(self.following, self.following)

    def give_up(self) -> list[T]:
        """Stop waiting for the numbers that are :meth:`missing`; those that may run now, in their order."""
        if not self.early:
            return []
        self.following = min(self.early)
        return self.offer(self.following, self.early.pop(self.following))
