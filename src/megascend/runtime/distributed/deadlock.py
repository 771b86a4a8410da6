"""Detect deadlocks between groups, such as rank 0 in a collective of the world while rank 1 is in one of the pair (0, 1). Pure.

No exchange inside a group can reveal this, since neither exchange ends. Every rank publishes the collectives that it enters
(:mod:`megascend.runtime.diagnostics.collective_sequence`); a rank that has waited long follows these records from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megascend.runtime.diagnostics.collective_sequence import CollectiveCounts


@dataclass(frozen=True)
class Pending:
    """A collective in which ranks are waiting: its channel, one of its ranks, its number."""

    channel: str
    rank: int
    number: int


def find_cycle(
    rank: int,
    read: Callable[[Sequence[int]], Mapping[int, CollectiveCounts]],
    members: Callable[[str, int], Sequence[int]],
) -> list[Pending]:
    """Return the cycle of collectives through that of ``rank``, each waiting for a rank in the next; empty if there is none.

    A rank leaves a collective only when all others have entered it. So a cycle never resolves, and one that is found in records
    of different moments exists: each of its ranks is still waiting for the next.

    Args:
        read: returns the collective counts that ranks have published.
        members: returns the ranks of the named channel that the given rank belongs to.
    """
    counts = dict(read([rank]))
    came_from: dict[int, int] = {}
    # Breadth first, so that the cycle reported is a shortest one; each row costs one read of the store for each rank in it.
    row = [rank]
    while row:
        waited_for = {}
        for waiting in row:
            count = counts[waiting]
            unread = [other for other in members(count.last, waiting) if other != waiting and other not in counts]
            counts |= read(unread)
            for other in members(count.last, waiting):
                # `other` has not entered the collective that `waiting` is in.
                if counts[other].of(count.last) < count.of(count.last):
                    if other == rank:
                        return _path(waiting, rank, came_from, counts)
                    # Without a last collective the rank is computing, or has died: it waits for no rank, so it is in no cycle.
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
