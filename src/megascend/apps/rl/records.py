"""Metrics that ``megascend rl`` logs at each step, and the panels of its plot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from megascend.apps.rl.rollout.buffer import Counts
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.apps.train.plot import Panel
from megascend.apps.train.run_log import EMPTY, MetricsRecord
from megascend.training.batch.metrics import Metric

if TYPE_CHECKING:
    from megascend.apps.rl.reference import Divergence
    from megascend.apps.rl.rollout.mismatch import Mismatch
    from megascend.sync.push import PushResult


@dataclass(frozen=True)
class RlRecord(MetricsRecord):
    """A step of reinforcement learning. Unknown numbers are null in metrics.jsonl."""

    reward: Annotated[
        float,
        Metric("reward", "mean over the trajectories graded since the previous step, those of dropped groups included"),
    ]
    reward_learned: Annotated[float, Metric("reward", "mean over the trajectories that the step learned from")]
    rewards: Annotated[
        Mapping[str, float],
        Metric(
            "reward",
            "parts of the reward by name, as the reward function or the environment returns them: means over the trajectories "
            "that the step learned from and that have the part; NAME/share is the fraction that has it, if not all do; in "
            "trackers rewards/NAME",
        ),
    ]
    eval_reward: Annotated[
        float | None,
        Metric(
            "reward",
            "mean on the evaluation prompts after the step; a failed episode counts as 0, or as the lowest reward if that is "
            "below; null where it was not measured",
        ),
    ]
    eval_failed: Annotated[
        int | None, Metric("episodes", "failed episodes of the evaluation after the step; null where none was made")
    ]
    loss: Annotated[float, Metric("", "objective before the update")]
    grad_norm: Annotated[float, Metric("", "global gradient norm before clipping")]
    lr: Annotated[float, Metric("", "learning rate of the update")]
    version: Annotated[int, Metric("", "version (step) of the weights that the engines have after the step")]
    lag: Annotated[float, Metric("steps", "mean over responses of the steps since the weights of their first token")]
    max_lag: Annotated[int, Metric("steps", "largest such lag")]
    mismatch: Annotated[float | None, Metric("nats", "mean |log p_trainer - log p_engine| of sampled tokens")]
    mismatch_max: Annotated[float | None, Metric("nats", "largest |log p_trainer - log p_engine|")]
    kl: Annotated[
        float | None, Metric("nats", "KL(engine || trainer) per token, by the k3 estimator, which is never negative")
    ]
    entropy: Annotated[
        float | None,
        Metric(
            "nats",
            "mean entropy of the trainer's distribution at the sampled tokens, before the update; null where it was not "
            "measured: objective.correction none saves the forward pass",
        ),
    ]
    truncated: Annotated[float | None, Metric("fraction", "tokens whose importance weight was cut to objective.cap")]
    teacher_kl: Annotated[
        float | None,
        Metric("nats", "mean log p_engine - log p_teacher of sampled tokens: estimates KL(model || teacher)"),
    ]
    kl_reference: Annotated[
        float | None,
        Metric(
            "nats", "KL(policy || reference) per sampled token, before the step, by the k3 estimator; null without one"
        ),
    ]
    kl_reference_k1: Annotated[float | None, Metric("nats", "the same by the k1 estimator, which may be negative")]
    router_replay_changed: Annotated[
        float | None,
        Metric(
            "fraction", "replayed choices of experts that the trainer's routers make differently; null without replay"
        ),
    ]
    response_tokens: Annotated[
        float, Metric("tokens", "mean number of sampled tokens in the trajectories that the step learned from")
    ]
    turns: Annotated[
        float, Metric("responses", "mean number of responses in such a trajectory; 1 without an environment")
    ]
    cut_off: Annotated[float, Metric("fraction", "responses of the step that reached rollout.max_tokens")]
    tokens: Annotated[int, Metric("tokens", "tokens of the step that carry loss, over all ranks")]
    shared_tokens: Annotated[
        int, Metric("tokens", "tokens of prompts and histories that were computed once for several trajectories")
    ]
    tokens_per_s: Annotated[float, Metric("tokens/s", "tokens divided by the duration of the step, waiting included")]
    stale: Annotated[
        int, Metric("groups", "groups dropped since the previous step because they exceeded rollout.max_lag")
    ]
    equal: Annotated[int, Metric("groups", "groups dropped since the previous step because their rewards were equal")]
    discarded: Annotated[
        int,
        Metric("groups", "groups dropped since the previous step because fewer than two of their episodes succeeded"),
    ]
    timed_out: Annotated[
        int, Metric("episodes", "episodes of the environment since the previous step that ran out of time")
    ]
    failed: Annotated[
        int, Metric("episodes", "episodes of the environment since the previous step that raised an exception")
    ]
    prompts: Annotated[int, Metric("prompts", "prompts dispatched since the run began")]
    wait_s: Annotated[float, Metric("s", "time that the trainer waited for rollouts")]
    idle: Annotated[float, Metric("fraction", "wait_s divided by the duration of the step")]
    sync_s: Annotated[float, Metric("s", "time that the trainer spent on updating the engines")]
    sync_bytes: Annotated[int, Metric("bytes", "bytes that all workers of the engines received, together")]
    sync_share: Annotated[
        float | None, Metric("fraction", "sync_bytes relative to complete weights; null without an update")
    ]
    pause_s: Annotated[float, Metric("s", "longest time that an engine stopped sampling for the update")]

    at_intervals = ("eval_reward",)

    def summary(self, earlier: Mapping[str, tuple[int, float]] = EMPTY) -> str:
        reward = "-" if math.isnan(self.reward) else f"{self.reward:.3f}"  # no episode ended since the previous step
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.rewards.items())
        figures = [
            f"reward {reward}{f' ({parts})' if parts else ''}",
            self.last_measured("eval_reward", "evaluation", 3, earlier),
            f"{self.eval_failed} failed" if self.eval_failed else "",
            f"length {self.response_tokens:.0f}",
            f"{self.cut_off:.0%} cut off" if self.cut_off else "",
            "" if self.entropy is None else f"entropy {self.entropy:.2f}",
            f"lag {self.lag:.1f}",
            "" if self.mismatch is None else f"mismatch {self.mismatch:.1e}",
            f"{self.tokens_per_s:,.0f} tokens/s",
            f"{self.idle:.0%} idle",
            "SKIPPED" if self.skipped else "",
        ]
        return "  ".join(filter(None, figures))


PANELS = (
    Panel("reward", "reward (all responses)", "tab:blue", smoothed=True, second=("eval_reward", "evaluation")),
    Panel("rewards", "parts of the reward", "tab:blue", smoothed=True),
    Panel("entropy", "entropy (nats a token)", "tab:cyan", smoothed=True),
    Panel("response_tokens", "sampled tokens of a trajectory", "tab:blue", smoothed=True),
    Panel("cut_off", "share cut off", "tab:brown", smoothed=True),
    Panel("grad_norm", "gradient norm, before clipping", "tab:orange", smoothed=True, decades=True),
    Panel("mismatch", "mean |log p_trainer - log p_engine|", "tab:red", decades=True),
    Panel("lag", "lag (steps)", "tab:purple"),
    Panel("kl_reference", "KL to the reference (nats per token)", "tab:brown"),
    Panel("stale", "groups dropped as too old", "tab:purple"),
    Panel("idle", "idle share of the trainer", "tab:gray"),
    Panel("pause_s", "pause of the engines (s)", "tab:orange"),
    Panel("tokens_per_s", "tokens learned from per second", "tab:green", smoothed=True),
)


def group_figures(groups: Sequence[TrajectoryGroup], step: int) -> dict[str, Any]:
    """Return the metrics of the groups that a step learned from. Pure.

    Args:
        step: steps done before it, which is the version of the trainer's weights.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    count = len(trajectories)
    lags = [step - trajectory.first_version for trajectory in trajectories]
    return {
        "reward_learned": sum(trajectory.reward for trajectory in trajectories) / count,
        "rewards": reward_parts(trajectories),
        "lag": sum(lags) / len(lags),
        "max_lag": max(lags),
        "response_tokens": sum(trajectory.sampled_tokens for trajectory in trajectories) / count,
        "turns": sum(trajectory.turns for trajectory in trajectories) / count,
        "cut_off": sum(trajectory.finish_reason == "length" for trajectory in trajectories) / count,
    }


def reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of every part of the reward over the trajectories that have it, and the share of these if not 1. Pure."""
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            parts[name].append(value)
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    shares = {f"{name}/share": len(values) / len(trajectories) for name, values in parts.items()}
    return means | {name: share for name, share in shares.items() if share < 1}


def count_figures(before: Counts, now: Counts) -> dict[str, Any]:
    """Return the metrics of the prompts since the previous step. Pure."""
    graded = now.responses - before.responses
    return {
        "reward": (now.reward - before.reward) / graded if graded else math.nan,
        "stale": now.stale - before.stale,
        "equal": now.equal - before.equal,
        "discarded": now.discarded - before.discarded,
        "timed_out": now.timed_out - before.timed_out,
        "failed": now.failed - before.failed,
        "prompts": now.dispatched,
    }


def mismatch_figures(mismatch: Mismatch | None) -> dict[str, Any]:
    if mismatch is None:
        return dict.fromkeys(("mismatch", "mismatch_max", "kl", "truncated"))
    return {
        "mismatch": mismatch.mean_abs,
        "mismatch_max": mismatch.max_abs,
        "kl": mismatch.kl_k3,
        "truncated": mismatch.truncated_share,
    }


def push_figures(pushes: Sequence[PushResult]) -> dict[str, Any]:
    """Return the metrics of a step's updates: of several, to one engine after another, together. Pure."""
    payload = sum(push.payload for push in pushes)
    complete = sum(push.payload / push.share for push in pushes if push.share)
    return {
        "sync_bytes": payload,
        "sync_share": payload / complete if complete else None,
        "pause_s": max((push.pause_s for push in pushes), default=0.0),
    }


def reference_figures(divergence: Divergence | None) -> dict[str, Any]:
    if divergence is None:
        return dict.fromkeys(("kl_reference", "kl_reference_k1"))
    return {"kl_reference": divergence.k3, "kl_reference_k1": divergence.k1}
