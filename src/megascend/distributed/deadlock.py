"""Collectives of different groups that wait for each other: rank 0 in one of the world, rank 1 in one of its pair. Pure.

Nothing that is exchanged inside a group can show this, since neither exchange ends. Every rank publishes the collectives that it
enters (:mod:`megascend.diagnostics.collective_sequence`); one that waits for long follows these records from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megascend.diagnostics.collective_sequence import CollectiveCounts


@dataclass(frozen=True)
class Pending:
    """A collective that ranks wait in: its channel, one of its ranks, its number."""

    channel: str
    rank: int
    number: int


def circle(
    rank: int,
    read: Callable[[Sequence[int]], Mapping[int, CollectiveCounts]],
    members: Callable[[str, int], Sequence[int]],
) -> list[Pending]:
    """Return the cycle of collectives through that of ``rank``, each waiting for a rank in the next; empty if there is none.

    A rank that has entered a collective cannot have left it before all others have come, so what is found does not pass: not even
    where the records are of different moments. Whoever is read last is waited for by one that still waits, and so on round.

    Args:
        read: what ranks have published.
        members: the ranks of a channel that holds a rank.
    """
    counts = dict(read([rank]))
    came_from: dict[int, int] = {}
    row = [rank]
    while row:
        waited_for = {}
        for waiting in row:
            here = counts[waiting]
            unread = [other for other in members(here.last, waiting) if other != waiting and other not in counts]
            counts |= read(unread)
            for other in members(here.last, waiting):
                if counts[other].of(here.last) < here.of(here.last):
                    if other == rank:
                        return _path(waiting, rank, came_from, counts)
                    if other not in came_from and counts[other].last:
                        came_from[other] = waiting
                        waited_for[other] = None
        row = list(waited_for)
    return []


def _path(last: int, first: int, came_from: Mapping[int, int], counts: Mapping[int, CollectiveCounts]) -> list[Pending]:
    ranks = [last]
    while ranks[-1] != first:
        ranks.append(came_from[ranks[-1]])
    return [Pending(counts[rank].last, rank, counts[rank].of(counts[rank].last)) for rank in reversed(ranks)]
