"""Advantages, compared with independent calculations."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascend.apps.rl.rollout.advantages import STD_EPSILON, overlong_penalty, without_signal
from megascend.apps.rl.rollout.advantages import advantages as step_advantages
from megascend.errors import ConfigError, DataError

REWARDS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)
GROUPS = st.lists(REWARDS, min_size=1, max_size=4)


def advantages(rewards: list[float], estimator: str, scaled: bool | None = None) -> list[float]:
    """Compute the advantages of a step of one group."""
    return step_advantages([rewards], estimator, scaled)[0]


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


@given(GROUPS)
def test_reinforce_pp_normalises_over_all_responses_of_the_step(groups: list[list[float]]) -> None:
    parts = [torch.tensor(rewards, dtype=torch.float64) for rewards in groups]
    rewards = torch.cat(parts)
    for scaled in (None, False):
        std = 1.0 if scaled is False else rewards.std() + STD_EPSILON
        expected = ((rewards - rewards.mean()) / std).tolist()
        results = step_advantages(groups, "reinforce++", scaled)
        assert [len(group) for group in results] == [len(group) for group in groups]
        assert list(chain(*results)) == pytest.approx(expected, rel=1e-6, abs=1e-6)
        centered = torch.cat([part - part.mean() for part in parts])
        std = 1.0 if scaled is False else centered.std() + STD_EPSILON
        results = step_advantages(groups, "reinforce++_baseline", scaled)
        assert list(chain(*results)) == pytest.approx((centered / std).tolist(), rel=1e-6, abs=1e-6)


@given(GROUPS, st.data())
def test_reinforce_pp_counts_responses_by_their_tokens(groups: list[list[float]], data: st.DataObject) -> None:
    counts = [[data.draw(st.integers(1, 9)) for _ in group] for group in groups]
    rewards, repeats = torch.tensor(list(chain(*groups)), dtype=torch.float64), torch.tensor(list(chain(*counts)))
    by_token = rewards.repeat_interleave(repeats)
    expected = ((rewards - by_token.mean()) / (by_token.std() + STD_EPSILON)).tolist()
    results = step_advantages(groups, "reinforce++", tokens=counts)
    assert list(chain(*results)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(REWARDS)
def test_division_by_the_standard_deviation_can_be_set(rewards: list[float]) -> None:
    assert advantages(rewards, "grpo", scaled=False) == advantages(rewards, "centered")
    assert advantages(rewards, "centered", scaled=True) == advantages(rewards, "grpo")
    std = torch.tensor(rewards, dtype=torch.float64).std()
    expected = [value / (float(std) + STD_EPSILON) for value in advantages(rewards, "rloo")]
    assert advantages(rewards, "rloo", scaled=True) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_overlong_penalty_falls_over_the_last_tokens() -> None:
    """Compare with DAPO's own lengths: 16384 tokens without penalty, and 4096 more."""
    lengths = {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 30000: -1.0}
    for length, penalty in lengths.items():
        assert overlong_penalty(length, 20480, 0.2) == pytest.approx(penalty, abs=1e-9)
    assert overlong_penalty(256, 256, 0.0) == 0.0


def test_groups_without_variance_are_those_whose_advantages_are_all_zero() -> None:
    assert without_signal([0.3, 0.3, 0.3])
    assert not without_signal([0.3, 0.3, 0.30001])
    assert advantages([0.5] * 8, "grpo") == [0.0] * 8


def test_invalid_estimator_and_rewards_raise_errors() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'gae'; known: grpo, rloo, centered, reinforce"):
        advantages([1.0, 2.0], "gae")
    with pytest.raises(DataError, match="two or more, got 1"):
        advantages([1.0], "grpo")
    with pytest.raises(DataError, match="response 1 is nan"):
        advantages([1.0, float("nan")], "rloo")
