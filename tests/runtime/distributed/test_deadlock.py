"""Circular waits of collectives, computed from published records. No processes."""

from __future__ import annotations

import pytest

from megascend.runtime.diagnostics.collective_sequence import CollectiveCounts as Counts
from megascend.runtime.distributed.deadlock import Pending, find_cycle

pytestmark = pytest.mark.waiting

GROUPS = {
    "world": [[0, 1, 2, 3]],
    "tp": [[0, 1], [2, 3]],
    "dp": [[0, 2], [1, 3]],
    "a": [[0, 1]],
    "b": [[1, 2]],
    "c": [[2, 0]],
}


def members(channel: str, rank: int) -> list[int]:
    return next((group for group in GROUPS.get(channel, []) if rank in group), [])


def circular_wait(rank: int, counts: dict[int, Counts]) -> list[Pending]:
    return find_cycle(rank, lambda ranks: {number: counts.get(number, Counts()) for number in ranks}, members)


@pytest.mark.parametrize("rank", [0, 1])
def test_deadlock_over_two_groups(rank: int) -> None:
    counts = {
        0: Counts({"world": 5, "tp": 1}, "world"),
        1: Counts({"world": 4, "tp": 2}, "tp"),
        2: Counts({"world": 5}, "world"),
        3: Counts({"world": 5}, "world"),
    }
    world, pair = Pending("world", 0, 5), Pending("tp", 1, 2)
    assert circular_wait(rank, counts) == ([world, pair] if rank == 0 else [pair, world])
    assert circular_wait(2, counts) == []  # rank 2 waits for rank 1, but no rank waits for rank 2


def test_deadlock_over_three_groups() -> None:
    counts = {0: Counts({"a": 1}, "a"), 1: Counts({"b": 1}, "b"), 2: Counts({"c": 1}, "c")}
    assert circular_wait(1, counts) == [Pending("b", 1, 1), Pending("c", 2, 1), Pending("a", 0, 1)]


@pytest.mark.parametrize(
    "other_counts",
    [
        {},  # no records
        {1: Counts({"tp": 1}, "tp"), 2: Counts({"world": 1}, "world")},  # leaving collectives that have ended
        {
            1: Counts({"dp": 1, "tp": 1, "start": 1}, "dp"),
            3: Counts({"start": 1}, "start"),
        },  # rank 1 waits for the slow rank 3
    ],
)
def test_late_ranks_are_no_deadlock(other_counts: dict[int, Counts]) -> None:
    assert circular_wait(0, {0: Counts({"world": 2, "tp": 1}, "world"), **other_counts}) == []
