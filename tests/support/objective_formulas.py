"""Objectives of reinforcement learning as their papers write them down, in plain PyTorch; nothing here is megascend's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.testing.hf_reference import policy_loss


@dataclass(frozen=True)
class Formula:
    """An objective, with GRPO's defaults.

    Attributes:
        loss: objective of a token or a sequence.
        low, high, dual: bounds of the ratio.
        baseline: what is subtracted from a reward: the mean of the group, of the others in it, or of the step.
        normalised: responses whose standard deviation divides: those of the group, or of the step, or none.
        average: over the tokens of all responses, or over responses of their mean, their sum, or their sum divided by ``length``.
        length: of the longest response.
        cap: largest importance weight, with the trainer as the old policy; infinite: the old policy is the engine's.
        cache: last part of ``length`` within which a reward falls by up to 1.
        filtered: without truncated responses.
    """

    loss: str = "ppo"
    low: float = 0.8
    high: float = 1.2
    dual: float = math.inf
    baseline: str = "group"
    normalised: str = "group"
    average: str = "tokens"
    length: int = 0
    cap: float = math.inf
    cache: float = 0.0
    filtered: bool = False


def expected_advantages(groups: list[TrajectoryGroup], formula: Formula) -> list[torch.Tensor]:
    rewards = [torch.tensor(group.rewards, dtype=torch.float64) for group in groups]
    if formula.cache:
        for group, values in zip(groups, rewards, strict=True):
            lengths = torch.tensor([response.sampled_tokens for response in group.trajectories]).double()
            soft = ((formula.length - formula.cache) - lengths) / formula.cache
            values += torch.where(lengths <= formula.length - formula.cache, 0.0, soft)
    # Token by token, as the whitening of verl and OpenRLHF.
    counts = [torch.tensor([response.sampled_tokens for response in group.trajectories]) for group in groups]
    step = torch.cat([values.repeat_interleave(count) for values, count in zip(rewards, counts, strict=True)]).mean()
    results: list[torch.Tensor] = []
    for values in rewards:
        leave_one_out = (values.sum() - values) / (len(values) - 1)
        results.append(values - {"group": values.mean(), "others": leave_one_out, "step": step}[formula.baseline])
    by_token = torch.cat([values.repeat_interleave(count) for values, count in zip(results, counts, strict=True)])
    if formula.normalised == "step" and formula.baseline == "group":
        results = [values - by_token.mean() for values in results]
    scales = {
        "group": [values.std() + 1e-6 for values in rewards],
        "step": [by_token.std() + 1e-6] * len(rewards),
        "none": [1.0] * len(rewards),
    }
    return [values / scale for values, scale in zip(results, scales[formula.normalised], strict=True)]


def reference(model: Any, groups: list[TrajectoryGroup], formula: Formula) -> tuple[float, torch.Tensor]:
    """Compute a step's loss, and its gradients in ``model`` (float64), from the formulas, one trajectory at a time.

    Returns the loss, and ratio and sign of the advantage of every token in it [2, tokens].
    """
    responses: list[torch.Tensor] = []
    ratios: list[torch.Tensor] = []
    for group, group_advantages in zip(groups, expected_advantages(groups, formula), strict=True):
        for response, advantage in zip(group.trajectories, group_advantages, strict=True):
            if formula.filtered and response.finish_reason == "length":
                continue
            logits = model(torch.tensor([[*response.prompt_tokens, *response.tokens]])).logits[0]
            start = len(response.prompt_tokens)
            chosen = [(i, token) for i, token in enumerate(response.tokens) if response.mask[i]]
            now = torch.stack([logits[start + i - 1].log_softmax(-1)[token] for i, token in chosen])
            engine = torch.tensor([response.logprobs[i] for i, _ in chosen], dtype=torch.float64)
            old, factor = engine, torch.ones_like(engine)
            if formula.cap < math.inf:
                old = now.detach()
                factor = torch.clamp(torch.exp(old - engine), max=formula.cap)
            bounds = (formula.low, formula.high)
            responses.append(-policy_loss(formula.loss, now, old, advantage * factor, bounds, formula.dual))
            ratios.append(torch.stack([torch.exp(now.detach() - old), (advantage * factor).sign()]))
    if formula.average == "tokens":
        objective = torch.cat(responses).mean()
    elif formula.average == "responses":
        objective = torch.stack([values.mean() for values in responses]).mean()
    else:
        divisor = {"fixed": formula.length, "sums": 1}[formula.average]
        objective = torch.stack([values.sum() / divisor for values in responses]).mean()
    (-objective).backward()
    return -float(objective.detach()), torch.cat(ratios, 1)
