"""Losses of a policy, on responses with the sampler's log-probabilities and advantages: PPO, GSPO, CISPO and others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascend.training.batch.loss import LARGEST_METRIC, LossInputs


def importance_sampling(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with importance weights: -(pi / pi_old) * advantage, as in Tinker's ``importance_sampling``."""
    log_ratio = logprobs - inputs.old_logprobs
    return -_ratio_times(log_ratio, inputs.advantages), {"ratio": _ratio_metric(log_ratio)}


def ppo(
    logprobs: Tensor,
    inputs: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
):
    """Clipped surrogate objective (Schulman et al. 2017, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A).

    With ``dual_clip`` c > 1, a negative advantage gives at most -c A (Ye et al. 2020, arXiv:1912.09729, eq. 5): without it, the
    loss of such a token grows with its ratio, beyond all bounds.
    """
    log_ratio = logprobs - inputs.old_logprobs
    surrogate, was_clipped = _clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high, dual_clip)
    return -surrogate, {
        "ratio": _ratio_metric(log_ratio),
        "clip_fraction": was_clipped.float(),
        "kl": _kl_metric(log_ratio),
    }


def cispo(logprobs: Tensor, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2):
    """Policy gradient whose importance weight is clipped and has no gradient (MiniMax-M1, 2025, eq. 4): no token is dropped."""
    log_ratio = logprobs.detach() - inputs.old_logprobs
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    weight = torch.where(inputs.advantages != 0, clipped, 0.0)  # not infinity * 0
    return -(weight * logprobs) * inputs.advantages, {
        "ratio": _ratio_metric(log_ratio),
        "clip_fraction": (clipped != ratio).float(),
    }


def gspo(logprobs: Tensor, inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4):
    """Clipped surrogate objective of sequences (Zheng et al. 2025, eq. 5 to 7).

    The ratio of a sequence is the geometric mean over its tokens with a weight; each token gets it.
    """
    # The ratio is a mean over tokens, whatever their weights.
    trained = (inputs.weights != 0).to(logprobs.dtype)

    def per_sample(values: Tensor) -> Tensor:
        totals = values.new_zeros(inputs.sample_count).index_add(
            0, inputs.sample, torch.where(trained > 0, values, 0.0)
        )
        return inputs.reduce_context(totals)

    # At least 1: a sample without weights has ratio 1, not 0 / 0.
    mean = per_sample(logprobs - inputs.old_logprobs) / per_sample(trained).clamp_min(1.0)
    log_ratio = mean[inputs.sample]
    surrogate, was_clipped = _clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)
    return -surrogate, {"ratio": _ratio_metric(log_ratio), "clip_fraction": was_clipped.float()}


def dro(logprobs: Tensor, inputs: LossInputs, beta: float = 0.05):
    """Policy gradient with a quadratic penalty on leaving the old policy (Richemond et al. 2024), as in Tinker's ``dro``."""
    log_ratio = logprobs - inputs.old_logprobs
    return 0.5 * beta * log_ratio.square() - logprobs * inputs.advantages, {"ratio": _ratio_metric(log_ratio)}


def stable_reinforce(logprobs: Tensor, inputs: LossInputs, kl_coeff: float = 0.01, max_ratio: float = 2.0):
    """Policy gradient of the expected advantage minus ``kl_coeff`` KL(pi || sampler), on the sampler's tokens.

    With r = pi / pi_old: -min(r, max_ratio) (A - kl_coeff log r) log pi, where only the last factor has a gradient. Truncated
    importance weights (Ionides 2008): up to ``max_ratio`` the gradient is exact in expectation, however old the sampler is;
    above, it is bounded.
    """
    log_ratio = (logprobs - inputs.old_logprobs).detach()
    ratio = torch.exp(log_ratio)
    penalised_advantages = inputs.advantages - (kl_coeff * log_ratio if kl_coeff else 0.0)
    was_clipped = ratio > max_ratio
    # Not multiplied by the ratio where it is clipped: it may be infinite.
    weighted = torch.where(was_clipped, max_ratio * penalised_advantages, _ratio_times(log_ratio, penalised_advantages))
    return -weighted * logprobs, {
        "ratio": _ratio_metric(log_ratio),
        "clip_fraction": was_clipped.float(),
        "kl": _kl_metric(log_ratio),
    }


# --- probability ratios; float32 overflows above exp(88.7) ---


class _RatioTimes(torch.autograd.Function):
    """exp(log_ratio) * factor, differentiable by log_ratio.

    The exponential is split, so that the product and its gradient leave float32 only where the exact ones do.
    """

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, factor: Tensor) -> Tensor:
        # Times the factor between the two roots: exp(100) * 1e-30 fits float32, and exp(100) alone does not.
        root = torch.exp(0.5 * log_ratio)
        ctx.save_for_backward(root, factor)
        return root * factor * root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        root, factor = ctx.saved_tensors
        # A zero gradient times an overflowing factor must not become NaN.
        return torch.where(grads[0] != 0, grads[0] * root * factor * root, 0.0), None


def _ratio_times(log_ratio: Tensor, factor: Tensor) -> Tensor:
    """Return exp(log_ratio) * factor; 0, with a gradient of 0, where the factor is 0."""
    return _RatioTimes.apply(torch.where(factor != 0, log_ratio, 0.0), factor)


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) for r = exp(log_ratio), and where the clipped term is the smaller one.

    With ``dual`` it is at least dual * A where A is negative, which also counts as clipped. The clipped term is constant, and an
    overflowing ratio must not be in its graph: 0 times its gradient would be NaN.
    """
    ratio = torch.exp(log_ratio.detach())
    bound = torch.clamp(ratio, 1 - low, 1 + high)
    above, below = (advantages > 0) & (ratio > bound), (advantages < 0) & (ratio < bound)
    was_clipped = above | below
    if dual is not None:
        over_dual = (advantages < 0) & (ratio > dual)
        bound, was_clipped = torch.where(over_dual, dual, bound), was_clipped | over_dual
    unclipped = _ratio_times(log_ratio, torch.where(was_clipped, 0.0, advantages))
    return torch.where(was_clipped, bound * advantages, unclipped), was_clipped


def _ratio_metric(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) as a metric, at most the largest float32."""
    return torch.exp(log_ratio.detach()).clamp_max(LARGEST_METRIC)


def _kl_metric(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r as a metric, at most the largest float32: the k3 estimator of KL(old || new), Schulman 2020.

    It is unbiased, and never negative.
    """
    log_ratio = log_ratio.detach()
    return torch.expm1(log_ratio).clamp_max(LARGEST_METRIC) - log_ratio.clamp(
        -LARGEST_METRIC, 88.0
    )  # not infinity - infinity
