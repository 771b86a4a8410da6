"""What a run of ``megascend rl`` writes down about each step, and draws at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megascend.app.plot import Panel
from megascend.app.run_log import MetricsRecord
from megascend.rollout.buffer import Counts
from megascend.rollout.group import Group

if TYPE_CHECKING:
    from megascend.rollout.mismatch import Mismatch


@dataclass(frozen=True)
class RlRecord(MetricsRecord):
    """A step of reinforcement learning. Numbers that are not known are null in metrics.jsonl.

    Attributes:
        reward: mean over all responses graded since the step before, those of dropped groups included.
        reward_learned: mean over the responses that the step learned from.
        eval_reward: of an evaluation with the weights after the step.
        loss: before the update.
        grad_norm: global norm before clipping.
        lr: learning rate of the update.
        version: of the weights that the engines have after the step.
        lag, max_lag: mean and largest number of steps that a response's oldest weights were behind.
        mismatch, mismatch_max: mean and largest ``|log p_trainer - log p_engine|`` of sampled tokens.
        kl: KL(engine || trainer) a token, by the estimator that is never negative.
        truncated: share of tokens whose importance weight was cut to the cap.
        response_tokens: mean length of the responses that the step learned from.
        cut_off: share of those that reached ``max_tokens``.
        tokens: tokens with a loss, over all ranks.
        tokens_per_s: those over the step's time, waiting included.
        stale, equal: groups dropped since the step before, because they were too old, or their rewards were equal.
        prompts: dispatched since the run began.
        wait_s: the trainer waited for rollouts.
        sync_s: the trainer stood still for an update of the engines.
        pause_s: the longest that an engine sampled nothing for it.
    """

    reward: float
    reward_learned: float
    eval_reward: float | None
    loss: float
    grad_norm: float
    lr: float
    version: int
    lag: float
    max_lag: int
    mismatch: float | None
    mismatch_max: float | None
    kl: float | None
    truncated: float | None
    response_tokens: float
    cut_off: float
    tokens: int
    tokens_per_s: float
    stale: int
    equal: int
    prompts: int
    wait_s: float
    sync_s: float
    pause_s: float

    def summary(self) -> str:
        """Format the figures of a step in one short line."""
        mismatch = "" if self.mismatch is None else f"  mismatch {self.mismatch:.1e}"
        evaluated = "" if self.eval_reward is None else f"  evaluation {self.eval_reward:.3f}"
        skipped = "  SKIPPED" if self.skipped else ""
        return (
            f"reward {self.reward:.3f}{evaluated}  lag {self.lag:.1f}{mismatch}  grad norm {self.grad_norm:.3f}  "
            f"{self.tokens_per_s:,.0f} tokens/s{skipped}"
        )


PANELS = (
    Panel("reward", "reward (mean over all responses)", "tab:blue", smoothed=True),
    Panel("eval_reward", "reward of evaluations", "tab:cyan"),
    Panel("lag", "lag (steps)", "tab:purple"),
    Panel("mismatch", "mismatch, mean |log p_trainer - log p_engine|", "tab:red"),
    Panel("pause_s", "pause of the engines (s)", "tab:orange"),
    Panel("tokens_per_s", "tokens learned from per second", "tab:green"),
)


def group_figures(groups: Sequence[Group], step: int) -> dict[str, Any]:
    """Return the metrics of the groups that a step learned from. Pure.

    Args:
        step: steps done before it, which is the version of the trainer's weights.
    """
    responses = [response for group in groups for response in group.responses]
    lags = [step - response.first_version for response in responses]
    return {
        "reward_learned": sum(response.reward for response in responses) / len(responses),
        "lag": sum(lags) / len(lags),
        "max_lag": max(lags),
        "response_tokens": sum(len(response.tokens) for response in responses) / len(responses),
        "cut_off": sum(response.finish_reason == "length" for response in responses) / len(responses),
    }


def count_figures(before: Counts, now: Counts) -> dict[str, Any]:
    """Return the metrics of the prompts since the previous step. Pure."""
    graded = now.responses - before.responses
    return {
        "reward": (now.reward - before.reward) / graded if graded else math.nan,
        "stale": now.stale - before.stale,
        "equal": now.equal - before.equal,
        "prompts": now.dispatched,
    }


def mismatch_figures(mismatch: Mismatch | None) -> dict[str, Any]:
    """Return the metrics of the mismatch. Pure."""
    if mismatch is None:
        return dict.fromkeys(("mismatch", "mismatch_max", "kl", "truncated"))
    return {
        "mismatch": mismatch.mean_abs,
        "mismatch_max": mismatch.max_abs,
        "kl": mismatch.kl_k3,
        "truncated": mismatch.truncated_share,
    }
