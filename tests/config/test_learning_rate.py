import math

import pytest

from megascend.config import Schedule
from megascend.config.training import learning_rate


def rates(schedule, steps, peak=1.0):
    return [learning_rate(schedule, peak, step) for step in range(steps)]


def test_constant_with_warmup():
    assert rates(Schedule(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_the_minimum_and_stays():
    values = rates(Schedule(kind="linear", total_steps=4, min_lr=0.2), 6)
    assert values == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_way_at_half_time():
    schedule = Schedule(kind="cosine", warmup_steps=10, total_steps=110, min_lr=0.1)
    assert learning_rate(schedule, 1.0, 10) == pytest.approx(1.0)
    assert learning_rate(schedule, 1.0, 60) == pytest.approx(0.55)
    assert learning_rate(schedule, 1.0, 35) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(schedule, 1.0, 110) == pytest.approx(0.1)
