"""One step's worth of learning: groups to samples, the correction for the engines' log-probabilities, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megascend.app.rl.reference import KL_WEIGHTS, Divergence, Reference
from megascend.batch.sample import Sample
from megascend.config.rl import Objective
from megascend.rollout.advantages import advantages
from megascend.rollout.group import TrajectoryGroup
from megascend.rollout.mismatch import Mismatch, measure, total, truncated_weights

if TYPE_CHECKING:
    from megascend.backend import Backend
    from megascend.batch.results import ForwardBackwardResult


@dataclass(frozen=True)
class Learned:
    """Result of learning from a batch, the same on every rank.

    Attributes:
        result: result of ``forward_backward``.
        mismatch: between the engines' log-probabilities and the trainer's before the step, or None where it was not measured. It
            holds both what kernels compute differently and what the policy has changed since the responses were sampled.
        divergence: of the policy before the step from the reference; None without one.
        penalised: the groups with the rewards that advantages were computed from; None: their own.
    """

    result: ForwardBackwardResult
    mismatch: Mismatch | None
    divergence: Divergence | None = None
    penalised: Sequence[TrajectoryGroup] | None = None


def learn(
    backend: Backend,
    groups: Sequence[TrajectoryGroup],
    objective: Objective,
    adapter: str | None = None,
    measured: bool = True,
    reference: Reference | None = None,
) -> Learned:
    """Accumulate the gradients of one batch of groups. Collective; every rank passes the same groups.

    Args:
        measured: measure the mismatch also with ``objective.correction: none``; costs a forward pass.
        reference: penalise the divergence from this model; costs a forward pass.
    """
    samples = [sample for group in groups for sample in group_samples(group, objective)]
    shard = backend.shard(samples)
    mismatch = trainer = None
    cap = objective.cap
    if objective.correction == "truncated" or measured or (reference is not None and reference.in_reward):
        # Before the gradients: with the weights that the step begins with.
        trainer = backend.forward(shard, adapter=adapter).logprobs
        parts = []
        for sample, logprobs in zip(shard, trainer, strict=True):
            # Sampled tokens only: all others have weight 0, and no log-probability of an engine.
            sampled = sample.weights > 0
            parts.append(measure(sample.old_logprobs[sampled], logprobs.cpu()[sampled], cap))
        # Sums, not means: ranks have different numbers of tokens.
        mismatch = total(backend.gather_by_data_rank(total(parts)))
    loss, penalised, reference_logprobs = objective.loss, None, []
    if reference is not None:
        reference_logprobs = reference.logprobs(shard)
        if reference.in_reward and trainer is not None:
            penalised = reference.penalised(groups, samples, shard, trainer, reference_logprobs)
            # Lengths are the same, and so is this rank's share.
            shard = backend.shard([sample for group in penalised for sample in group_samples(group, objective)])
        shard, loss = reference.attached(shard, reference_logprobs), reference.with_kl(loss)
    if objective.correction == "truncated" and trainer is not None:
        shard = [corrected(sample, logprobs.cpu(), cap) for sample, logprobs in zip(shard, trainer, strict=True)]
    if reference is None:
        return Learned(backend.forward_backward(shard, loss=loss, adapter=adapter), mismatch)
    result = backend.forward_backward(shard, loss=loss, adapter=adapter, logprobs=trainer is None)
    policy = result.logprobs if trainer is None else trainer
    assert policy is not None
    return Learned(result, mismatch, reference.divergence(shard, policy, reference_logprobs), penalised)


def group_samples(group: TrajectoryGroup, objective: Objective) -> list[Sample]:
    """Convert the trajectories of a group to samples, with advantages and the engine's own log-probabilities as the old ones.

    A trajectory of n sampled tokens has n targets with a weight: 1 each, or 1 / n where every trajectory counts alike. What an
    environment wrote between them has weight 0.
    """
    samples = []
    for trajectory, advantage in zip(group.trajectories, advantages(group.rewards, objective.advantages), strict=True):
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
        sample.weights = sample.weights * sampled
        sample.old_logprobs = torch.cat([before, torch.tensor(trajectory.logprobs, dtype=torch.float32)])
        sample.advantages = advantage * sampled
        if objective.average == "responses":
            sample.weights = sample.weights / trajectory.sampled_tokens
        samples.append(sample)
    return samples


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
