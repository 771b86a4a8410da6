"""Engines that failed are left out for a bounded time, and come back one request at a time."""

from __future__ import annotations

from megascend.rollout.availability import FIRST_S, LONGEST_S, Availability


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_least_busy_engine_is_asked_and_one_that_failed_is_not() -> None:
    clock = Clock()
    found = Availability(3, clock)
    assert found.best([0, 1, 2], [2, 1, 3]) == 1
    assert found.failed(1) == FIRST_S
    assert found.best([0, 1, 2], [2, 0, 3]) == 0
    clock.now += FIRST_S
    assert found.best([0, 1, 2], [2, 0, 3]) == 1, "on trial"
    assert found.best([0, 1, 2], [2, 1, 3]) == 0, "with one request at a time"
    assert found.answered(1)
    assert not found.answered(1)
    assert found.best([0, 1, 2], [2, 1, 3]) == 1


def test_failures_in_a_row_double_the_time_up_to_a_bound_and_simultaneous_ones_count_once() -> None:
    clock = Clock()
    found = Availability(1, clock)
    times = []
    for _ in range(8):
        times.append(found.failed(0))
        assert found.failed(0) is None, "sent before the first had failed"
        clock.now += LONGEST_S
    assert times[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert set(times[4:]) == {LONGEST_S}
    found.answered(0)
    assert found.failed(0) == FIRST_S


def test_if_all_are_left_out_the_one_whose_time_is_over_first_is_asked() -> None:
    clock = Clock()
    found = Availability(3, clock)
    for which in (2, 0, 1):
        found.failed(which)
        clock.now += 1
    assert found.best([0, 1, 2], [0, 0, 5]) == 2
    assert found.best([0, 1], [0, 0, 5]) == 0
