"""Records, verdicts, the plan and the summary: plain data."""

from __future__ import annotations

import math

import pytest

from npu_acceptance import parity, plan
from npu_acceptance.records import (
    at_most,
)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.5, "ok"), (1.0, "ok"), (1.01, "failed"), (math.nan, "failed"), (math.inf, "failed"), (-1.0, "ok")],
)
def test_at_most_fails_above_the_bound_or_if_not_finite(value: float, verdict: str) -> None:
    assert at_most("error", value, 1.0).verdict == verdict


def test_parity_cases_have_wider_bounds_on_cards() -> None:
    simulated, cards = parity.cases(True, False), parity.cases(False, False)
    assert {case.name for case in simulated} == {*parity.FROM_MATRIX, *(case.name for case in parity.ON_EIGHT)}
    assert [case.world_size for case in simulated] == sorted(case.world_size for case in simulated)
    assert {case.world_size for case in simulated} == {1, 2, 4, 8}
    for simulated_case, card_case in zip(simulated, cards, strict=True):
        assert simulated_case.name == card_case.name
        assert simulated_case.loss_bound < card_case.loss_bound
        assert simulated_case.parallel == card_case.parallel
    assert [plan.largest_power_of_two(cards) for cards in range(1, 9)] == [1, 2, 2, 4, 4, 4, 4, 8]
