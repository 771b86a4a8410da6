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
    """Collectives, that of ``rank`` among them, each of which waits for a rank that is in the next; empty if there are none.

    A rank that has entered a collective cannot have left it before all others have come, so what is found does not pass: not even
    where the records are of different moments. Whoever is read last is waited for by one that still waits, and so on round.

    Args:
        read: what ranks have published.
        members: the ranks of a channel that holds a rank.
    """
    known = dict(read([rank]))
    came_from: dict[int, int] = {}
    row = [rank]
    while row:
        waited_for = {}
        for waiting in row:
            here = known[waiting]
            others = [other for other in members(here.last, waiting) if other != waiting and other not in known]
            known |= read(others)
            for other in members(here.last, waiting):
                if known[other].of(here.last) < here.of(here.last):
                    if other == rank:
                        return _path(waiting, rank, came_from, known)
                    if other not in came_from and known[other].last:
                        came_from[other] = waiting
                        waited_for[other] = None
        row = list(waited_for)
    return []


def _path(last: int, first: int, came_from: Mapping[int, int], known: Mapping[int, CollectiveCounts]) -> list[Pending]:
    ranks = [last]
    while ranks[-1] != first:
        ranks.append(came_from[ranks[-1]])
    return [Pending(known[rank].last, rank, known[rank].of(known[rank].last)) for rank in reversed(ranks)]
