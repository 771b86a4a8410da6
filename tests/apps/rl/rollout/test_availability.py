"""Failed engines are skipped for a bounded time, then retried with one request at a time."""

from __future__ import annotations

from megascend.apps.rl.rollout.availability import FIRST_S, LONGEST_S, Availability


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_least_busy_engine_is_chosen_and_a_failed_one_is_not() -> None:
    clock = Clock()
    availability = Availability(3, clock)
    assert availability.best([0, 1, 2], [2, 1, 3]) == 1
    assert availability.failed(1) == FIRST_S
    assert availability.best([0, 1, 2], [2, 0, 3]) == 0
    clock.now += FIRST_S
    assert availability.best([0, 1, 2], [2, 0, 3]) == 1, "on trial"
    assert availability.best([0, 1, 2], [2, 1, 3]) == 0, "with one request at a time"
    assert availability.succeeded(1)
    assert not availability.succeeded(1)
    assert availability.best([0, 1, 2], [2, 1, 3]) == 1


def test_failures_in_a_row_double_the_time_up_to_a_bound_and_simultaneous_ones_count_once() -> None:
    clock = Clock()
    availability = Availability(1, clock)
    times = []
    for _ in range(8):
        times.append(availability.failed(0))
        assert availability.failed(0) is None, "sent before the first had failed"
        clock.now += LONGEST_S
    assert times[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert set(times[4:]) == {LONGEST_S}
    availability.succeeded(0)
    assert availability.failed(0) == FIRST_S


def test_if_all_engines_failed_the_one_due_first_is_chosen() -> None:
    clock = Clock()
    availability = Availability(3, clock)
    for index in (2, 0, 1):
        availability.failed(index)
        clock.now += 1
    assert availability.best([0, 1, 2], [0, 0, 5]) == 2
    assert availability.best([0, 1], [0, 0, 5]) == 0
