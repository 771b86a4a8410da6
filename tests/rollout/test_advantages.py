"""Advantages, compared with independent calculations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascend.errors import ConfigError, DataError
from megascend.rollout.advantages import ESTIMATORS, STD_EPSILON, advantages, without_signal

REWARDS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


@given(REWARDS)
def test_grpo_matches_standardization_with_torch(rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + STD_EPSILON)
    assert advantages(rewards, "grpo") == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)


@given(REWARDS)
def test_rloo_leaves_each_response_out_of_its_own_baseline(rewards: list[float]) -> None:
    for index, advantage in enumerate(advantages(rewards, "rloo")):
        other_rewards = rewards[:index] + rewards[index + 1 :]
        assert advantage == pytest.approx(rewards[index] - sum(other_rewards) / len(other_rewards), rel=1e-9, abs=1e-9)


@given(REWARDS)
def test_rloo_is_the_centered_one_scaled_by_n_over_n_minus_1(rewards: list[float]) -> None:
    factor = len(rewards) / (len(rewards) - 1)
    expected = [factor * value for value in advantages(rewards, "centered")]
    assert advantages(rewards, "rloo") == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(REWARDS, st.floats(-50, 50), st.sampled_from(sorted(ESTIMATORS)))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float], shift: float, estimator: str) -> None:
    moved = advantages([reward + shift for reward in rewards], estimator)
    # GRPO divides by a standard deviation, which is only rounding noise for (almost) equal rewards.
    if max(rewards) - min(rewards) > 1e-3 or estimator != "grpo":
        assert moved == pytest.approx(advantages(rewards, estimator), rel=1e-6, abs=1e-6)


def test_figures_by_hand() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "centered") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1.0, 0.0, 0.0, 0.0], "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert advantages([1.0, 0.0, 0.0, 0.0], "grpo") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_groups_without_variance_are_those_whose_advantages_are_all_zero() -> None:
    assert without_signal([0.3, 0.3, 0.3])
    assert not without_signal([0.3, 0.3, 0.30001])
    assert advantages([0.5] * 8, "grpo") == [0.0] * 8


def test_invalid_estimator_and_rewards_raise_errors() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'gae'; known: grpo, rloo, centered"):
        advantages([1.0, 2.0], "gae")
    with pytest.raises(DataError, match="two or more, got 1"):
        advantages([1.0], "grpo")
    with pytest.raises(DataError, match="response 1 is nan"):
        advantages([1.0, float("nan")], "rloo")
