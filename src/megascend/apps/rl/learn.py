"""One step's worth of learning: groups to samples, the correction for the engines' log-probabilities, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megascend.apps.rl.reference import KL_WEIGHTS, Divergence, ReferenceModel
from megascend.apps.rl.rollout.advantages import response_length, step_advantages
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.apps.rl.rollout.mismatch import Mismatch, measure, total, truncated_weights
from megascend.config.rl import Objective
from megascend.errors import ConfigError
from megascend.training.batch.candidates import allowed_rows
from megascend.training.batch.loss import Loss
from megascend.training.batch.losses import resolve
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from megascend.apps.rl.teacher import TeacherScores
    from megascend.backend import Backend
    from megascend.training.batch.results import ForwardBackwardResult


@dataclass(frozen=True)
class LearnResult:
    """Result of learning from a batch, the same on every rank.

    Attributes:
        mismatch: difference between the engines' log-probabilities and the trainer's before the step, or None where it was not
            measured: by other kernels, and by what the policy has changed since the responses were sampled.
        divergence: divergence of the policy before the step from the reference; None without a reference.
        penalised: the groups with the rewards that advantages were computed from; None: their own.
        entropy: mean entropy of the trainer's distribution at the sampled tokens, in nats; None where ``mismatch`` is None.
    """

    result: ForwardBackwardResult
    mismatch: Mismatch | None
    divergence: Divergence | None = None
    penalised: Sequence[TrajectoryGroup] | None = None
    entropy: float | None = None


def learn(
    backend: Backend,
    groups: Sequence[TrajectoryGroup],
    objective: Objective,
    adapter: str | None = None,
    measured: bool = True,
    reference: ReferenceModel | None = None,
    teacher: TeacherScores | None = None,
) -> LearnResult:
    """Accumulate the gradients of one batch of groups. Collective; every rank passes the same groups.

    Args:
        measured: measure the mismatch also with ``objective.correction: none``; costs a forward pass.
        reference: penalise the divergence from this model; costs a forward pass.
        teacher: its scores of these groups, to learn.
    """
    # Over all groups, before ranks and micro batches divide them: no average and no advantage depends on the layout.
    samples = step_samples(groups, objective, teacher)
    shard = backend.shard(samples)
    mismatch = entropy = trainer = None
    cap = objective.cap
    if objective.correction == "truncated" or measured or (reference is not None and reference.in_reward):
        # Before the gradients: with the weights that the step begins with.
        forward = backend.forward(shard, entropy=True, adapter=adapter)
        assert forward.entropy is not None
        trainer, parts, entropies = forward.logprobs, [], 0.0
        for sample, logprobs, token_entropy in zip(shard, trainer, forward.entropy, strict=True):
            # Sampled tokens only: all others have weight 0, and no log-probability of an engine.
            sampled = sample.weights > 0
            parts.append(measure(sample.old_logprobs[sampled], logprobs.cpu()[sampled], cap))
            entropies += float(token_entropy[sampled].double().sum())
        # Sums, not means: ranks have different numbers of tokens.
        sums = backend.gather_by_data_rank((total(parts), entropies))
        mismatch = total(part for part, _ in sums)
        entropy = sum(part for _, part in sums) / mismatch.tokens if mismatch.tokens else math.nan
    loss, penalised, reference_logprobs = objective_loss(objective), None, []
    if teacher is not None:
        loss = teacher.loss(loss)
    if reference is not None:
        reference_logprobs = reference.logprobs(shard)
        if reference.in_reward and trainer is not None:
            penalised = reference.penalise(groups, samples, shard, trainer, reference_logprobs)
            # Lengths are the same, and so is this rank's share.
            shard = backend.shard(step_samples(penalised, objective, teacher))
        shard, loss = reference.attached(shard, reference_logprobs), reference.with_kl(loss)
    if objective.correction == "truncated" and trainer is not None:
        shard = [corrected(sample, logprobs.cpu(), cap) for sample, logprobs in zip(shard, trainer, strict=True)]
    loss = averaged(loss, groups, objective)
    if reference is None:
        return LearnResult(backend.forward_backward(shard, loss=loss, adapter=adapter), mismatch, entropy=entropy)
    result = backend.forward_backward(shard, loss=loss, adapter=adapter, logprobs=trainer is None)
    policy = result.logprobs if trainer is None else trainer
    assert policy is not None
    divergence = reference.divergence(shard, policy, reference_logprobs)
    return LearnResult(result, mismatch, divergence, penalised, entropy)


def step_samples(
    groups: Sequence[TrajectoryGroup], objective: Objective, teacher: TeacherScores | None = None
) -> list[Sample]:
    """Convert the trajectories of a step to samples, with advantages and the engine's own log-probabilities as the old ones.

    A trajectory of n sampled tokens has n targets with a weight: 1 each, or 1 / n where every response counts alike. What an
    environment wrote between them has weight 0, as have all targets of a trajectory that the objective leaves out.
    """
    samples = []
    for group, group_advantages in zip(groups, step_advantages(groups, objective), strict=True):
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            prompt = len(trajectory.prompt_tokens)
            sample = Sample.causal(
                [*trajectory.prompt_tokens, *trajectory.tokens],
                prompt_length=prompt,
                routed_experts=None
                if trajectory.routed_experts is None
                else trajectory.routed_experts.numbers().astype("int16"),
            )
            before = torch.zeros(prompt - 1)  # targets that belong to the prompt
            sampled = torch.cat([before, torch.tensor(trajectory.mask, dtype=torch.float32)])
            sample.weights = sample.weights * sampled * _counts(trajectory, objective)
            sample.old_logprobs = torch.cat([before, torch.tensor(trajectory.logprobs, dtype=torch.float32)])
            sample.advantages = advantage * sampled
            sample.temperature = trajectory.temperature
            if trajectory.allowed is not None:
                sample.allowed = allowed_rows(prompt - 1, trajectory.allowed)
            if objective.average == "responses":
                sample.weights = sample.weights / trajectory.sampled_tokens
            samples.append(sample)
    return samples if teacher is None else teacher.add_to(samples)


def averaged(loss: Loss, groups: Sequence[TrajectoryGroup], objective: Objective) -> Loss:
    """Return a loss on the samples of ``groups`` that is divided by the tokens or responses of all of them."""
    if loss.reduction == "sum":  # a registered loss that is not to be divided
        return loss
    trajectories = [
        trajectory for group in groups for trajectory in group.trajectories if _counts(trajectory, objective)
    ]
    if objective.average == "tokens":
        divisor = sum(trajectory.sampled_tokens for trajectory in trajectories)
    else:
        divisor = len(trajectories) * (response_length(objective) if objective.average == "fixed" else 1)
    # Not 0: a step whose responses are all left out has the loss 0.
    return replace(loss, divisor=float(divisor or 1))


def objective_loss(objective: Objective) -> Loss:
    try:
        loss = resolve(objective.loss)
    except ConfigError as error:
        raise ConfigError(f"objective.loss: {error}") from None
    for name, value in objective.loss_options.items():
        try:
            loss = loss.with_settings(**{name: value})
        except ConfigError as error:
            setting = f"loss_settings.{name}" if name in objective.loss_settings else name
            raise ConfigError(f"objective.{setting}: {value:g}, but {error}") from None
    return loss


def describe_objective(objective: Objective) -> str:
    """Describe an objective in a line, with the values that count: for a dry run."""
    preset = "" if objective.preset is None else f"{objective.preset}: "
    options = {
        name: value for name, value in objective_loss(objective).effective_settings().items() if value is not None
    }
    correction = "no correction"
    if objective.correction == "truncated":
        # At a ratio of 1 the defaults of built-in losses have no effect.
        options, correction = objective.loss_settings, f"weights truncated at {objective.cap:g}"
    values = ", ".join(f"{name} {value}" for name, value in options.items())
    divided = {None: "", True: " divided by std", False: " not divided by std"}[objective.divide_by_std]
    length = f" {objective.length}" if objective.average == "fixed" else ""
    parts = [
        f"loss {objective.loss}{f' ({values})' if values else ''}",
        f"advantages {objective.advantages}{divided}",
        f"average {objective.average}{length}",
        correction,
    ]
    if objective.overlong_share:
        parts.append(f"overlong_share {objective.overlong_share:g} of {objective.length}")
    if objective.drop_truncated:
        parts.append("truncated responses dropped")
    return preset + ", ".join(parts)


def _counts(trajectory: Trajectory, objective: Objective) -> bool:
    """Check whether a trajectory is part of the loss."""
    return not (objective.drop_truncated and trajectory.finish_reason == "length")


def corrected(sample: Sample, trainer: torch.Tensor, cap: float) -> Sample:
    """Return a sample whose old log-probabilities are the trainer's and whose advantages carry the truncated importance weights.

    ``E_engine[min(pi / mu, c) f] ~ E_trainer[f]``, so that the loss sees samples as if the trainer itself had drawn them; its own
    ratio then starts at 1 (the decoupled objective of Fu et al. 2025, AReaL, arXiv:2505.24298, with truncated weights). A term of
    the loss for the divergence from a reference gets the same weights.

    Args:
        trainer: fp32 [length], the trainer's log-probabilities of the targets.
    """
    weights = truncated_weights(sample.old_logprobs, trainer, cap)
    sampled = sample.weights > 0
    extra = {name: values * weights if name == KL_WEIGHTS else values for name, values in sample.extra.items()}
    return replace(
        sample,
        advantages=torch.where(sampled, weights * sample.advantages, 0.0),
        old_logprobs=torch.where(sampled, trainer, 0.0),
        extra=extra,
    )
