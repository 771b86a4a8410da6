"""KL divergence of the policy to a reference model: the reference's log-probabilities, penalties, and metrics.

With ``d = log pi - log pi_ref`` of a token that the policy sampled, the estimators of KL(pi || pi_ref) are k1 = d, k2 = d^2 / 2
and k3 = exp(-d) - 1 + d (Schulman 2020, "Approximating KL divergence"). Which of them may be used where follows from their
gradients, not from their values (Tang and Munos 2025, arXiv:2506.09477):

- in the loss, k2 has the gradient of KL(pi || pi_ref), k3 that of KL(pi_ref || pi), and k1 none in expectation; all of them are
  of the next token's distribution, without the influence of a token on those that follow
- in the reward, where the penalty is a constant factor of grad log pi, the sum of k1 gives the gradient of KL(pi || pi_ref) of
  whole responses; those of k2 and k3 vanish to first order as the policy approaches the reference
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.apps.train.swapped_weights import SwappedWeights, difference_of_models
from megascend.config.rl import BASE, ReferenceSettings, RlConfig
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.training.batch.loss import Loss, LossInputs

if TYPE_CHECKING:
    from megascend.backend import Backend
    from megascend.training.batch.sample import Sample

logger = logging.getLogger(__name__)

KL_WEIGHTS = "kl_weights"
"""Field of samples with the importance weight of each token's term in the loss."""

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: 0.5 * difference * difference,
    "k3": lambda difference: torch.expm1(-difference) + difference,
}


@dataclass(frozen=True)
class Divergence:
    """Sums over sampled tokens of estimates of KL(policy || reference), in nats."""

    tokens: int = 0
    sum_k1: float = 0.0
    sum_k3: float = 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(self.tokens + other.tokens, self.sum_k1 + other.sum_k1, self.sum_k3 + other.sum_k3)

    @property
    def k1(self) -> float:
        """Mean per token; NaN without tokens."""
        return self.sum_k1 / self.tokens if self.tokens else math.nan

    @property
    def k3(self) -> float:
        """Mean per token, never negative; NaN without tokens."""
        return self.sum_k3 / self.tokens if self.tokens else math.nan


class ReferenceModel:
    """Reference model of a run, on the ranks and in the layout of the policy.

    With adapters it is the frozen model without them. Otherwise its weights are in host memory, and take the policy's place on
    the device for one forward pass a step: the same kernels compute both, and equal weights give equal log-probabilities.

    To be built before a checkpoint is loaded: the model of a new backend has the weights that the run begins with. Collective.
    """

    def __init__(self, backend: Backend, settings: ReferenceSettings) -> None:
        self._backend, self._settings = backend, settings
        engine = backend.engine
        self._weights: SwappedWeights | None = None
        if engine.trainable.frozen:
            return
        self._weights = SwappedWeights(backend)
        if settings.model != BASE:
            self._weights.read(Path(settings.model), "reference.model")

    @property
    def in_reward(self) -> bool:
        return self._settings.penalty == "reward" and self._settings.coefficient > 0

    @property
    def in_loss(self) -> bool:
        return self._settings.penalty == "loss" and self._settings.coefficient > 0

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the reference's log-probabilities of the targets: fp32 [length] on the CPU each. Collective.

        Router replay is for the policy: the reference chooses experts itself.
        """
        samples = [replace(sample, routed_experts=None) for sample in samples]
        if self._weights is None:
            return self._backend.forward(samples, reference=True).logprobs
        with self._weights.in_place():
            return self._backend.forward(samples).logprobs

    def penalise(
        self,
        groups: Sequence[TrajectoryGroup],
        samples: Sequence[Sample],
        shard: Sequence[Sample],
        policy: Sequence[Tensor],
        reference: Sequence[Tensor],
    ) -> list[TrajectoryGroup]:
        """Subtract from each trajectory's reward the coefficient times its tokens' summed estimates; return such groups.

        Collective.

        Args:
            samples: samples of all trajectories, in order.
            shard: the samples of this data parallel rank; the same objects.
            policy, reference: log-probabilities of their targets, [length] each.
        """
        estimate, order = ESTIMATORS[self._settings.kl_estimator], {id(sample): i for i, sample in enumerate(samples)}
        trajectories, local = [trajectory for group in groups for trajectory in group.trajectories], {}
        for sample, *logprobs in zip(shard, policy, reference, strict=True):
            number = order[id(sample)]
            # Also those that are left out of the loss: the advantages of others are compared with their rewards.
            mask = torch.tensor(trajectories[number].mask)
            sampled = torch.cat([torch.zeros(len(sample) - len(mask), dtype=torch.bool), mask])
            local[number] = float(estimate(_differences(sampled, *logprobs)).sum())
        sums = {index: value for part in self._backend.gather_by_data_rank(local) for index, value in part.items()}
        coefficient, numbers = self._settings.coefficient, iter(range(len(samples)))
        return [
            replace(
                group,
                trajectories=tuple(
                    replace(trajectory, reward=trajectory.reward - coefficient * sums[next(numbers)])
                    for trajectory in group.trajectories
                ),
            )
            for group in groups
        ]

    def attached(self, samples: Sequence[Sample], reference: Sequence[Tensor]) -> list[Sample]:
        """Return samples with ``ref_logprobs``, and what :meth:`with_kl` needs."""
        return [
            replace(
                sample,
                ref_logprobs=torch.where(sample.weights != 0, logprobs, 0.0),
                extra=sample.extra | ({KL_WEIGHTS: (sample.weights != 0).float()} if self.in_loss else {}),
            )
            for sample, logprobs in zip(samples, reference, strict=True)
        ]

    def with_kl(self, loss: Loss) -> Loss:
        """Return the loss with the term of the divergence, if settings say so."""
        if not self.in_loss:
            return loss
        return with_kl(loss, self._settings.kl_estimator, self._settings.coefficient)

    def divergence(
        self, samples: Sequence[Sample], policy: Sequence[Tensor], reference: Sequence[Tensor]
    ) -> Divergence:
        """Return the estimates over the sampled tokens of all data parallel ranks. Collective.

        Args:
            policy, reference: log-probabilities of their targets, [length] each.
        """
        local = Divergence()
        for sample, *logprobs in zip(samples, policy, reference, strict=True):
            difference = _differences(sample.weights != 0, *logprobs)
            k1, k3 = (float(ESTIMATORS[name](difference).sum()) for name in ("k1", "k3"))
            local += Divergence(len(difference), k1, k3)
        return sum(self._backend.gather_by_data_rank(local), Divergence())


def _differences(sampled: Tensor, policy: Tensor, reference: Tensor) -> Tensor:
    """Return ``log pi - log pi_ref`` where ``sampled``, float64."""
    return policy.cpu().double()[sampled] - reference.cpu().double()[sampled]


@functools.cache
def with_kl(loss: Loss, estimator: str, coefficient: float) -> Loss:
    """Return a loss plus ``coefficient`` times an estimate of KL(policy || reference) of each token.

    Engines sampled the tokens, maybe with older weights: each term has the importance weight in the samples' field
    :data:`KL_WEIGHTS`, which has no gradient.
    """
    estimate = ESTIMATORS[estimator]

    def penalised_loss(logprobs: Tensor, inputs: LossInputs) -> Any:
        output = loss(logprobs, inputs)
        values, metrics = output if isinstance(output, tuple) else (output, {})
        assert inputs.extra is not None
        terms = inputs.extra[KL_WEIGHTS] * estimate(logprobs - inputs.ref_logprobs)
        return values + coefficient * terms, metrics

    return replace(
        loss,
        name=f"{loss.name} + {coefficient:g} {estimator}",
        function=penalised_loss,
        requires=(*loss.requires, "ref_logprobs"),
        settings=(),
        is_cross_entropy=False,
    )


def check_reference(config: RlConfig, info: ModelInfo, *, warns: bool) -> None:
    """Check that the reference is a model like the policy, and warn of an estimator without effect. Local."""
    settings = config.reference
    if settings is None:
        return
    if settings.penalty == "reward" and settings.kl_estimator != "k1" and settings.coefficient and warns:
        logger.warning(
            "reference.estimator: %s in the reward hardly pulls a policy that is near the reference: its gradient vanishes there "
            "to first order; k1 has that of the KL divergence",
            settings.kl_estimator,
        )
    if settings.model == BASE:
        return
    directory = Path(settings.model)
    if not directory.is_dir():
        raise ConfigError(f"reference.model: {directory} is not a directory: name a Hugging Face checkpoint, or {BASE}")
    if difference := difference_of_models(directory, config.model, info, config.mtp):
        raise ConfigError(f"reference.model: {difference}")
