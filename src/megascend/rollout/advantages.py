"""Advantages of the responses to one prompt, computed from their rewards. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megascend.errors import ConfigError, DataError

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as verl and TRL do for GRPO."""
MIN_RANGE = 1e-9
"""Rewards of a group whose range is at most this give no learning signal."""
LARGEST_REWARD = 1e18
"""Advantages are float32, and the gradient norm squares the values that they scale."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """Compute ``(r_i - mean) / std``: Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.2.

    The paper leaves open which standard deviation; as in TRL and verl it is the sample's, with n - 1 in the denominator.
    """
    mean = math.fsum(rewards) / len(rewards)
    # fsum: rewards of very different size must not lose the small ones.
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Compute ``r_i`` minus the mean of the other rewards: Ahmadian et al. 2024 (arXiv:2402.14740), equation 7."""
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def centered(rewards: Sequence[float]) -> list[float]:
    """Compute ``r_i - mean``: GRPO without the division, Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": grpo, "rloo": rloo, "centered": centered}


def advantages(rewards: Sequence[float], estimator: str) -> list[float]:
    """Compute one advantage per response, which applies to all of its tokens.

    Args:
        rewards: rewards of all responses to one prompt, at least two.
        estimator: a key of ``ESTIMATORS``.

    Raises:
        ConfigError: the estimator is unknown.
        DataError: fewer than two responses, or a reward is not finite or too large.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"advantages: unknown estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
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
    return ESTIMATORS[estimator](rewards)


def without_signal(rewards: Sequence[float]) -> bool:
    """Check whether all rewards of a group are equal, so that every estimator gives 0 for each response.

    Dropping such groups and sampling others instead is dynamic sampling (Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2).
    """
    return max(rewards) - min(rewards) <= MIN_RANGE
