"""Advantages of the responses of a step, computed from their rewards. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.config.rl import Objective
from megascend.errors import ConfigError, DataError

STD_EPSILON = 1e-6
"""Added to standard deviations, as verl and TRL do for GRPO."""
MIN_RANGE = 1e-9
"""Rewards of a group whose range is at most this give no learning signal."""
LARGEST_REWARD = 1e18
"""Advantages are float32, and the gradient norm squares the values that they scale."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: what is subtracted from a reward, and what the difference is divided by.

    Attributes:
        baseline: mean of the rewards of the group, of the other responses in it, or of all responses of the step.
        scope: responses over which the standard deviation is taken; with ``step`` the mean too, and each counts by its tokens.
        scaled: divides by the standard deviation, unless set otherwise.
    """

    baseline: Literal["group", "others", "step"]
    scope: Literal["group", "step"]
    scaled: bool


ESTIMATORS = {
    # Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.2.
    "grpo": Estimator("group", "group", scaled=True),
    # Ahmadian et al. 2024 (arXiv:2402.14740), equation 7.
    "rloo": Estimator("others", "group", scaled=False),
    # GRPO without the division: Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2.
    "centered": Estimator("group", "group", scaled=False),
    # Hu et al. 2025 (arXiv:2501.03262): normalised over the step, without and with a baseline of the group.
    "reinforce++": Estimator("step", "step", scaled=True),
    "reinforce++_baseline": Estimator("group", "step", scaled=True),
}


def advantages(
    groups: Sequence[Sequence[float]],
    estimator: str,
    scaled: bool | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Compute one advantage per response, which applies to all of its tokens.

    The papers leave open which standard deviation divides; as in TRL and verl it is the sample's, with n - 1 in the denominator.

    Args:
        groups: rewards of all responses to each prompt of a step, at least two of each.
        scaled: divide by the standard deviation of the rewards of the group, or by that of the step's advantages; None: as the
            estimator does.
        tokens: sampled tokens of each response, by which it counts in the mean and standard deviation of a step, as in verl and
            OpenRLHF; None: all count alike.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"advantages: unknown estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    for rewards in groups:
        _check(rewards)
    kind = ESTIMATORS[estimator]
    scaled = kind.scaled if scaled is None else scaled
    results = [_centered(rewards, kind.baseline) for rewards in groups]
    if kind.scope == "step":
        values = [value for group in results for value in group]
        counts = [1] * len(values) if tokens is None else [count for group in tokens for count in group]
        mean, divisor = _mean(values, counts), _std(values, counts) + STD_EPSILON if scaled else 1.0
        return [[(value - mean) / divisor for value in group] for group in results]
    if scaled:
        return [
            [value / (_std(rewards) + STD_EPSILON) for value in group]
            for group, rewards in zip(results, groups, strict=True)
        ]
    return results


def _centered(rewards: Sequence[float], baseline: str) -> list[float]:
    if baseline == "others":
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
    # The step's mean is subtracted with its standard deviation.
    mean = _mean(rewards) if baseline == "group" else 0.0
    return [reward - mean for reward in rewards]


def _mean(values: Sequence[float], counts: Sequence[int] | None = None) -> float:
    counts = [1] * len(values) if counts is None else counts
    # fsum: rewards of very different size must not lose the small ones.
    return math.fsum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def _std(values: Sequence[float], counts: Sequence[int] | None = None) -> float:
    counts = [1] * len(values) if counts is None else counts
    mean = _mean(values, counts)
    squares = ((value - mean) ** 2 * count for value, count in zip(values, counts, strict=True))
    return math.sqrt(math.fsum(squares) / (sum(counts) - 1))


def _check(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise DataError(
            f"advantages compare the responses to one prompt: there must be two or more, got {len(rewards)}"
        )
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(f"the reward of response {index} is {reward}; rewards must be finite")
        if abs(reward) > LARGEST_REWARD:
            raise DataError(
                f"the reward of response {index} is {reward:g}; beyond {LARGEST_REWARD:g} its advantage would overflow: scale it"
            )


def without_signal(rewards: Sequence[float]) -> bool:
    """Check whether all rewards of a group are equal, so that every estimator with a baseline of the group gives 0.

    Dropping such groups and sampling others instead is dynamic sampling (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2).
    """
    return max(rewards) - min(rewards) <= MIN_RANGE


def overlong_penalty(tokens: int, length: int, share: float) -> float:
    """Return what DAPO's soft overlong punishment (arXiv:2503.14476, equation 13) adds to a response's reward: -1 to 0.

    Args:
        length: longest response, at which it is -1.
        share: last part of ``length`` within which it falls from 0; 0: no penalty.
    """
    return min(max(((1 - share) * length - tokens) / (share * length), -1.0), 0.0) if share else 0.0


def reward_parts(trajectory: Trajectory, objective: Objective) -> dict[str, float]:
    """Return the objective's additions to the reward of a trajectory, by name."""
    if not objective.overlong_share:
        return {}
    penalty = overlong_penalty(trajectory.sampled_tokens, response_length(objective), objective.overlong_share)
    return {"overlong": penalty}


def step_advantages(groups: Sequence[TrajectoryGroup], objective: Objective) -> list[list[float]]:
    """Return the advantage of every trajectory of a step, from its reward and the objective's additions."""
    rewards = [
        [trajectory.reward + sum(reward_parts(trajectory, objective).values()) for trajectory in group.trajectories]
        for group in groups
    ]
    tokens = [[trajectory.sampled_tokens for trajectory in group.trajectories] for group in groups]
    return advantages(rewards, objective.advantages, objective.divide_by_std, tokens)


def response_length(objective: Objective) -> int:
    """Return ``objective.length``, which a run file fills in."""
    assert objective.length is not None
    return objective.length
