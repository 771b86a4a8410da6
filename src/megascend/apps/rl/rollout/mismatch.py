"""Mismatch between the log-probabilities of an inference engine and the trainer, and importance weights that correct it. Pure.

The engine that samples and the trainer that learns compute the same model with different kernels, and often with weights of
different versions. A token is sampled with probability ``pi_engine`` but treated as if sampled with ``pi_trainer``; the ratio of
the two is the error (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mismatch:
    """Statistics over sampled tokens, with ``d = log pi_trainer - log pi_engine`` of each token.

    Attributes:
        sum_abs: sum of ``|d|``.
        max_abs: the largest ``|d|``; 0 without tokens.
        sum_k3: sum of ``exp(d) - 1 - d``; its mean estimates KL(engine || trainer) without bias and is never negative (Schulman
            2020, "Approximating KL divergence").
        truncated: tokens whose ``exp(d)`` is above the cap.
    """

    tokens: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    sum_k3: float = 0.0
    truncated: int = 0

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.tokens + other.tokens,
            self.sum_abs + other.sum_abs,
            max(self.max_abs, other.max_abs),
            self.sum_k3 + other.sum_k3,
            self.truncated + other.truncated,
        )

    @property
    def mean_abs(self) -> float:
        """Mean of ``|d|``; NaN without tokens, like the other means."""
        return self._mean(self.sum_abs)

    @property
    def kl_k3(self) -> float:
        """KL(engine || trainer) in nats a token, by the estimator that is never negative."""
        return self._mean(self.sum_k3)

    @property
    def truncated_share(self) -> float:
        """Share of tokens whose importance weight was truncated to the cap."""
        return self._mean(self.truncated)

    def _mean(self, total: float) -> float:
        return total / self.tokens if self.tokens else math.nan


def measure(engine: Tensor, trainer: Tensor, cap: float = math.inf) -> Mismatch:
    """Compute the statistics of one vector of tokens.

    Args:
        engine: [n], log-probabilities that the engine reported for the tokens it sampled.
        trainer: [n], the trainer's for the same tokens.
        cap: ``cap`` of :func:`truncated_weights`.
    """
    if engine.shape != trainer.shape or engine.dim() != 1:
        raise ValueError(
            f"log-probabilities of shapes {tuple(engine.shape)} and {tuple(trainer.shape)}; [n] both expected"
        )
    if not len(engine):
        return Mismatch()
    difference = trainer.double() - engine.double()
    k3 = torch.where(difference == math.inf, math.inf, difference.expm1() - difference)  # not infinity - infinity
    return Mismatch(
        tokens=len(difference),
        sum_abs=float(difference.abs().sum()),
        max_abs=float(difference.abs().max()),
        sum_k3=float(k3.sum()),
        truncated=int((difference.exp() > cap).sum()),
    )


def total(parts: Iterable[Mismatch]) -> Mismatch:
    return sum(parts, Mismatch())


def truncated_weights(engine: Tensor, trainer: Tensor, cap: float) -> Tensor:
    """Compute ``min(pi_trainer / pi_engine, cap)``, fp32 [n]: truncated importance sampling (Yao et al. 2025; Ionides 2008).

    Args:
        cap: upper bound, above 0; 2 is common.
    """
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    return torch.exp(trainer.double() - engine.double()).clamp(max=cap).float()
