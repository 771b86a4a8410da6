"""Advantages of a step's trajectories, from their rewards and the objective's penalties. Without torch."""

from __future__ import annotations

from collections.abc import Sequence

from megascend.apps.rl.rollout.advantages import advantages, overlong_penalty
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.config.rl import Objective


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
