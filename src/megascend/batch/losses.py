"""Loss functions: callables on (log-probs or values, inputs), the built-in ones, and a registry by name.

A loss returns one value per token, per sample or per preference pair, *unreduced*; the step weights, normalises and sums over
micro batches, data and context parallel ranks, so a loss never depends on the layout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascend.config.data import ProblemType
from megascend.config.plugins import LOSSES, POLICY_LOSSES
from megascend.errors import ConfigError, DataError
from megascend.kernels.linear_divergence import TeacherDivergence
from megascend.tracking.metrics import Metric


@dataclass
class LossInputs:
    """Inputs of a loss function: this rank's part of one micro batch; n tokens, padding included.

    Padding has weight 0, and its log-probability (or value), entropy and fields are 0; values of other tokens of weight 0 are 0
    if they are not finite. No token of weight 0 has a gradient, whatever the function returns there; other results do not
    depend on padding as long as the function works token by token (or on :meth:`sum_per_sample`).

    Attributes:
        targets: int64 [n].
        weights: float32 [n].
        entropy: float32 [n] with gradient, or None unless the loss asks for it.
        advantages: float32 [n] or None.
        old_logprobs: float32 [n] or None.
        ref_logprobs: float32 [n] or None.
        returns: float32 [n] or None.
        old_values: float32 [n] or None.
        extra: further float32 [n] fields.
        sample: int64 [n], index of each token's sample in the micro batch.
        sample_count: samples in the micro batch.
        pairs: int64 [pairs, 2], positions of the chosen and the rejected sample of each pair.
        labels: int64 [samples], the samples' labels, or float32 [samples, labels] if a sample has a number for each; None unless
            the loss requires ``label``.
        candidate_ids: int64 [n, K], a teacher's likeliest tokens, -1 at unused slots; None unless the loss requires
            ``candidates``, as the next two.
        teacher_logprobs: float32 [n, K], the teacher's log-probabilities of them.
        candidate_logprobs: float32 [n, K] with gradient, the model's. Both are 0 at unused slots.
        divergence: float32 [n] with gradient, from the teacher of the loss; None unless it has one.
        last: int64, indices of samples' last tokens among the n; None except for losses of values.
        reduce_context: sums a tensor over context parallel ranks, differentiably.
        members: index of each of the micro batch's samples in this rank's list, on the host.
    """

    targets: Tensor
    weights: Tensor
    sample: Tensor
    sample_count: int
    pairs: Tensor
    reduce_context: Callable[[Tensor], Tensor]
    entropy: Tensor | None = None
    # Tensors if all samples have them; Any, so that a loss that requires a field need not check for None.
    advantages: Any = None
    old_logprobs: Any = None
    ref_logprobs: Any = None
    returns: Any = None
    old_values: Any = None
    candidate_ids: Any = None
    teacher_logprobs: Any = None
    candidate_logprobs: Any = None
    divergence: Any = None
    labels: Any = None
    last: Tensor | None = None
    extra: dict[str, Tensor] | None = None
    members: Sequence[int] = ()

    def sum_per_sample(self, values: Tensor) -> Tensor:
        """Return the weighted sum of per-token ``values`` [n] over each sample, across context parallel ranks: [samples]."""
        # where, not a product: infinity at weight 0 must not become NaN.
        weighted_values = torch.where(self.weights != 0, values * self.weights, 0.0)
        totals = values.new_zeros(self.sample_count).index_add(0, self.sample, weighted_values)
        return self.reduce_context(totals)

    def mean_per_sample(self, values: Tensor) -> Tensor:
        """Return the weighted mean of per-token ``values`` [n] over each sample: [samples]; 0 without weights."""
        weights = self.sum_per_sample(torch.ones_like(values))
        return self.sum_per_sample(values) / torch.where(weights != 0, weights, 1.0)

    def at_last(self, values: Tensor) -> Tensor:
        """Return ``values`` [n, ...] at the last token of each sample, on any context parallel rank: [samples, ...]."""
        assert self.last is not None, "only losses of values get the samples' last tokens"
        # The context parallel ranks that do not hold a sample's last token add 0.
        totals = values.new_zeros(self.sample_count, *values.shape[1:])
        last_values = totals.index_add(0, self.sample[self.last], values[self.last])
        return self.reduce_context(last_values)


MARGIN = "margin"
"""Name in ``Sample.extra`` of the margin of a preference pair, the same number at each token."""

LossFunction = Callable[[Tensor, LossInputs], Any]
LossUnit = Literal["token", "sample", "pair"]


@dataclass(frozen=True)
class Loss:
    """A loss function and its requirements.

    Attributes:
        name: label for messages and metrics.
        function: ``(logprobs [n], LossInputs) -> losses`` or ``-> (losses, {metric: numbers})``; losses and metrics have
            shape [n] for ``per="token"``, [samples] for ``per="sample"`` and [pairs] for ``per="pair"``.
        of: first argument of the function: ``logprobs`` of the targets, or ``values`` of a scalar head, [n, labels] if it has
            several labels.
        per: unit of the average: tokens by their weights, or samples or preference pairs with equal weights.
        requires: per-token fields of :class:`megascend.Sample` that must be set, ``candidates`` or ``label``.
        entropy: True if ``inputs.entropy`` is needed.
        reduction: ``mean``: the sum of weighted values is divided by the weights of the global batch (or its pairs). ``sum``: it
            is not; then weights may also be negative, or 0 everywhere, and metrics are averaged over the targets with a weight.
        divisor: number by which the sum of weighted values is divided in place of the weights (samples, pairs) of the global
            batch; weights may then be 0 everywhere.
        settings: keyword arguments of ``function``; see :meth:`with_settings`.
        is_cross_entropy: the values are the negative log-probabilities, and the function only adds metrics. If the head can, it
            computes the gradient with the logits, as for ``cross_entropy``; the function is then called without a graph.
        divergence: ``inputs.divergence`` to compute: from a teacher, by its hidden states in the samples' ``teacher_states``.
    """

    name: str
    function: LossFunction
    per: LossUnit = "token"
    requires: tuple[str, ...] = ()
    entropy: bool = False
    reduction: Literal["mean", "sum"] = "mean"
    settings: tuple[tuple[str, float], ...] = ()
    of: Literal["logprobs", "values"] = "logprobs"
    is_cross_entropy: bool = False
    divisor: float | None = None
    divergence: TeacherDivergence | None = None

    def __post_init__(self) -> None:
        if self.divisor is not None and (self.reduction == "sum" or not 0 < self.divisor < math.inf):
            raise ConfigError(
                f"loss {self.name!r}: divisor is a number above 0 for losses with reduction='mean'; got {self.divisor}, "
                f"reduction={self.reduction!r}"
            )
        if self.divergence is not None and (
            "teacher_states" not in self.requires or self.entropy or self.of != "logprobs" or self.is_cross_entropy
        ):
            raise ConfigError(
                f"loss {self.name!r}: divergence=... is for losses of log-probabilities without entropy whose requires has "
                f"'teacher_states'; got requires={self.requires}, of={self.of!r}, entropy={self.entropy}"
            )
        if self.is_cross_entropy and (self.per != "token" or self.of != "logprobs" or self.entropy):
            raise ConfigError(
                f"loss {self.name!r}: is_cross_entropy=True is for losses of tokens by their log-probabilities; got "
                f"per={self.per!r}, of={self.of!r}, entropy={self.entropy}"
            )

    def with_settings(self, /, **settings: float) -> Loss:
        """Return this loss with keyword arguments of its function, e.g. ``ppo``'s ``clip_low``. Equal settings make equal losses.

        Raises:
            ConfigError: the function has no such argument; the message lists its arguments.
        """
        names = list(self._arguments())
        unknown = [name for name in settings if name not in names]
        if unknown:
            raise ConfigError(f"loss {self.name!r} has no setting {unknown[0]!r}; it has: {', '.join(names) or 'none'}")
        return replace(self, settings=tuple(sorted({**dict(self.settings), **settings}.items())))

    def effective_settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the function with their values, defaults included."""
        defaults = {name: value for name, value in self._arguments().items() if value is not inspect.Parameter.empty}
        return defaults | dict(self.settings)

    def _arguments(self) -> dict[str, Any]:
        """Return the names and defaults of the function's keyword arguments."""
        parameters = list(inspect.signature(self.function).parameters.values())[2:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind in kinds}

    def describe(self) -> str:
        """Describe what must be equal on all ranks."""
        settings = "".join(f", {name}={value!r}" for name, value in self.settings)
        divisor = "" if self.divisor is None else f", divisor={self.divisor!r}"
        divergence = "" if self.divergence is None else f", divergence={self.divergence.describe()}"
        return f"loss={self.name!r}{settings}{divisor}{divergence}" + (
            ", reduction='sum'" if self.reduction == "sum" else ""
        )

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> Any:
        return self.function(logprobs, inputs, **dict(self.settings))


def cross_entropy(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Negative log-likelihood of the targets."""
    return -logprobs


def importance_sampling(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with importance weights: -(pi / pi_old) * advantage, as in Tinker's ``importance_sampling``."""
    log_ratio = logprobs - inputs.old_logprobs
    return -_ratio_times(log_ratio, inputs.advantages), {"ratio": _ratio_figure(log_ratio)}


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
        "ratio": _ratio_figure(log_ratio),
        "clip_fraction": was_clipped.float(),
        "kl": _kl_figure(log_ratio),
    }


def cispo(logprobs: Tensor, inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2):
    """Policy gradient whose importance weight is clipped and has no gradient (MiniMax-M1, 2025, eq. 4): no token is dropped."""
    log_ratio = logprobs.detach() - inputs.old_logprobs
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    weight = torch.where(inputs.advantages != 0, clipped, 0.0)  # not infinity * 0
    return -(weight * logprobs) * inputs.advantages, {
        "ratio": _ratio_figure(log_ratio),
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
    return -surrogate, {"ratio": _ratio_figure(log_ratio), "clip_fraction": was_clipped.float()}


def dro(logprobs: Tensor, inputs: LossInputs, beta: float = 0.05):
    """Policy gradient with a quadratic penalty on leaving the old policy (Richemond et al. 2024), as in Tinker's ``dro``."""
    log_ratio = logprobs - inputs.old_logprobs
    return 0.5 * beta * log_ratio.square() - logprobs * inputs.advantages, {"ratio": _ratio_figure(log_ratio)}


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
        "ratio": _ratio_figure(log_ratio),
        "clip_fraction": was_clipped.float(),
        "kl": _kl_figure(log_ratio),
    }


# --- probability ratios; float32 overflows above exp(88.7) ---

LARGEST = torch.finfo(torch.float32).max


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
        # Where no gradient arrives, an overflowing factor must not turn it into NaN.
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


def _ratio_figure(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) as a metric, at most the largest float32."""
    return torch.exp(log_ratio.detach()).clamp_max(LARGEST)


def _kl_figure(log_ratio: Tensor) -> Tensor:
    """Return r - 1 - log r as a metric, at most the largest float32: the k3 estimator of KL(old || new), Schulman 2020.

    It is unbiased, and never negative.
    """
    log_ratio = log_ratio.detach()
    return torch.expm1(log_ratio).clamp_max(LARGEST) - log_ratio.clamp(-LARGEST, 88.0)  # not infinity - infinity


def dpo(logprobs: Tensor, inputs: LossInputs, beta: float = 0.1):
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7); needs ``ref_logprobs`` and complete pairs."""
    # Differences are summed, not sums subtracted: two sums over thousands of tokens would cancel most of their digits.
    margins = inputs.sum_per_sample(logprobs - inputs.ref_logprobs)
    chosen, rejected = margins[inputs.pairs[:, 0]], margins[inputs.pairs[:, 1]]
    logits = beta * (chosen - rejected)
    return -F.logsigmoid(logits), {
        "accuracy": (logits > 0).float(),
        # Finite: an infinite metric would spoil the average over all pairs.
        "reward_chosen": (beta * chosen.detach()).clamp(-LARGEST, LARGEST),
        "reward_rejected": (beta * rejected.detach()).clamp(-LARGEST, LARGEST),
    }


def orpo(logprobs: Tensor, inputs: LossInputs, beta: float = 0.1):
    """Odds ratio preference optimisation (Hong et al. 2024, eq. 6 and 7); needs complete pairs, and no reference.

    The mean negative log-likelihood of the chosen response, plus ``beta`` (the paper's lambda) times -log sigmoid of the log odds
    ratio. The probability of a response is the geometric mean over its tokens.
    """
    means = inputs.mean_per_sample(logprobs)
    # At probability 1 the odds are infinite, and float32 may round a mean of log-probabilities to 0.
    log_odds = means - _log_complement(means.clamp_max(-1e-7))
    chosen, rejected = inputs.pairs[:, 0], inputs.pairs[:, 1]
    ratio = log_odds[chosen] - log_odds[rejected]
    return beta * -F.logsigmoid(ratio) - means[chosen], {
        "accuracy": (ratio > 0).float(),
        "nll_chosen": -means[chosen].detach(),
        "log_odds_ratio": ratio.detach(),
    }


def simpo(logprobs: Tensor, inputs: LossInputs, beta: float = 2.0, gamma: float = 1.0):
    """SimPO: simple preference optimisation (Meng et al. 2024, eq. 6); needs complete pairs, and no reference.

    -log sigmoid(reward of the chosen - reward of the rejected - gamma); a reward is beta times the mean log-probability.
    """
    rewards = beta * inputs.mean_per_sample(logprobs)
    chosen, rejected = rewards[inputs.pairs[:, 0]], rewards[inputs.pairs[:, 1]]
    return -F.logsigmoid(chosen - rejected - gamma), {
        "accuracy": (chosen > rejected).float(),
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
    }


def kto(
    logprobs: Tensor,
    inputs: LossInputs,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: float = 0.0,
):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, eq. 7 and 8) of samples with label 1 (desirable) or 0.

    With r = sum(weight * (logp - ref)) of a sample: ``desirable_weight`` (1 - sigmoid(beta (r - kl))), or
    ``undesirable_weight`` (1 - sigmoid(beta (kl - r))).

    Args:
        kl: the reference point, an estimate of KL(policy || reference) over the global batch, which is not differentiated.
    """
    log_ratio = inputs.sum_per_sample(logprobs - inputs.ref_logprobs)
    desirable = inputs.labels > 0
    gain = beta * torch.where(desirable, log_ratio - kl, kl - log_ratio)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where sigmoid(x) is near 1.
    return torch.where(desirable, desirable_weight, undesirable_weight) * torch.sigmoid(-gain), {
        "accuracy": (gain > 0).float(),
        "reference_point": torch.full_like(gain, kl),
    }


def _log_complement(log_probability: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x < 0, exact at both ends (Maechler 2012)."""
    near_zero = log_probability > -math.log(2)
    # Each branch sees only what it is exact for: the other one's infinite gradient times 0 would be NaN.
    small = torch.where(near_zero, log_probability, -1.0)
    large = torch.where(near_zero, -1.0, log_probability)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


def value(values: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared distance of a critic's values to ``returns``."""
    distance = values - inputs.returns
    return 0.5 * distance * distance, {"value": values.detach()}


def clipped_value(values: Tensor, inputs: LossInputs, clip: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's value loss as in its authors' code: the larger loss of the value and of the value clipped around ``old_values``."""
    clipped_values = inputs.old_values + (values - inputs.old_values).clamp(-clip, clip)
    # Distances are compared, not their squares: two squares that overflow are equal.
    plain, clipped = (values - inputs.returns).abs(), (clipped_values - inputs.returns).abs()
    # The larger loss is the pessimistic one: a value that moves away from the return is not rewarded by the clip.
    larger = torch.maximum(plain, clipped)
    return 0.5 * larger * larger, {
        "value": values.detach(),
        "clip_fraction": (clipped > plain).detach().float(),
    }


def bradley_terry(
    values: Tensor, inputs: LossInputs, center_coefficient: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry (1952) loss of a reward model, -log sigmoid(chosen - rejected - margin); needs complete pairs.

    A reward is the value at a sample's last token. The margin is ``extra["margin"]`` of the chosen sample there, or 0 (Touvron et
    al. 2023, arXiv:2307.09288, eq. 2).

    Args:
        center_coefficient: factor of (chosen + rejected)^2 beside it, which keeps rewards around 0 (Eisenstein et al. 2023,
            arXiv:2312.09244, eq. 2).
    """
    rewards = inputs.at_last(values)
    chosen, rejected = rewards[inputs.pairs[:, 0]], rewards[inputs.pairs[:, 1]]
    difference = gain = chosen - rejected
    margin = (inputs.extra or {}).get(MARGIN)
    if margin is not None:
        gain = difference - inputs.at_last(margin)[inputs.pairs[:, 0]]
    loss = -F.logsigmoid(gain)
    if center_coefficient:
        loss = loss + center_coefficient * (chosen + rejected).square()
    return loss, {
        "accuracy": (chosen > rejected).float(),
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
        # Finite: an infinite metric would spoil the average over all pairs.
        "reward_margin": difference.detach().clamp(-LARGEST, LARGEST),
        "reward_mean": (0.5 * chosen + 0.5 * rejected).detach(),
    }


# --- sequence classifiers: of the values at a sample's last token, as transformers' ForSequenceClassificationLoss ---


def single_label_classification(values: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of a sample's label, by its values as logits."""
    logits = inputs.at_last(values)
    loss = F.cross_entropy(logits, inputs.labels, reduction="none")
    return loss, {"accuracy": (predictions("single_label_classification", logits) == inputs.labels).float()}


def multi_label_classification(values: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over labels of the binary cross entropy, by the values as logits; a sample's label is 0 or 1 for each of them."""
    logits = inputs.at_last(values).view(inputs.labels.shape)
    loss = F.binary_cross_entropy_with_logits(logits, inputs.labels.to(logits), reduction="none").mean(-1)
    correct = predictions("multi_label_classification", logits) == (inputs.labels > 0.5)
    return loss, {"accuracy": correct.float().mean(-1), "exact_match": correct.all(-1).float()}


def regression(values: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over a sample's numbers of the squared distance of its values."""
    distance = inputs.at_last(values).view(inputs.labels.shape) - inputs.labels
    return distance.square().mean(-1), {"absolute_error": distance.detach().abs().mean(-1)}


def predictions(problem_type: ProblemType, logits: Tensor) -> Tensor:
    """Return the labels that a classifier gives: int64 [samples], or bool [samples, labels] of several labels."""
    return logits.argmax(-1) if problem_type == "single_label_classification" else logits > 0


# --- distillation: a teacher's candidates, and all other tokens as one ---

TAIL_FLOOR = 1e-6
"""Least probability of the tokens that are not candidates: below it, 1 minus the others' sum is float32's rounding."""


def forward_kl(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(teacher || student) over the teacher's candidates and, as one further outcome, all other tokens (Hinton et al. 2015).

    A lower bound of the divergence over the whole vocabulary, equal to it if the candidates are all tokens.
    """
    teacher, student, used, metrics = _outcomes(inputs)
    return _divergence(teacher, student, used), metrics


def reverse_kl(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(student || teacher) over the outcomes of :func:`forward_kl` (Gu et al. 2024, MiniLLM)."""
    teacher, student, used, metrics = _outcomes(inputs)
    return _divergence(student, teacher, used), metrics


def jsd(logprobs: Tensor, inputs: LossInputs, beta: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """Generalised Jensen-Shannon divergence (Agarwal et al. 2024, GKD, eq. 1) over the outcomes of :func:`forward_kl`.

    beta KL(teacher || m) + (1 - beta) KL(student || m), with m = beta teacher + (1 - beta) student and 0 < beta < 1.
    """
    if not 0 < beta < 1:
        raise ConfigError(f"loss 'jsd': beta={beta:g} is not between 0 and 1; forward_kl and reverse_kl are its limits")
    teacher, student, used, metrics = _outcomes(inputs)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    value = beta * _divergence(teacher, mixture, used) + (1 - beta) * _divergence(student, mixture, used)
    return value, metrics


def _outcomes(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return log-probabilities [n, K + 1] of teacher and student, which of them are outcomes, and metrics."""
    used = inputs.candidate_ids >= 0
    columns, masses = [], []
    for logprobs in (inputs.teacher_logprobs, inputs.candidate_logprobs):
        mass = torch.where(used, logprobs.exp(), 0.0).sum(1)
        # Rounded log-probabilities may sum to more than 1.
        tail = (1 - mass).clamp_min(TAIL_FLOOR).log()
        columns.append(torch.cat([logprobs, tail[:, None]], 1))
        masses.append(mass.detach())
    outcomes = torch.cat([used, used.new_ones(len(used), 1)], 1)
    return columns[0], columns[1], outcomes, {"teacher_mass": masses[0], "student_mass": masses[1]}


def _divergence(first: Tensor, second: Tensor, used: Tensor) -> Tensor:
    """Return KL(first || second) [n] of log-probabilities [n, outcomes], where ``used``."""
    return torch.where(used, first.exp() * (first - second), 0.0).sum(1)


def vocabulary_divergence(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Divergence from the teacher of the loss over the whole vocabulary."""
    return inputs.divergence


def teacher_loss(divergence: TeacherDivergence) -> Loss:
    """Return the loss that is a divergence from a teacher, token by token; its samples have ``teacher_states``."""
    name = f"{divergence.kind} over the vocabulary"
    return Loss(name, vocabulary_divergence, requires=("teacher_states",), divergence=divergence)


LOSS_METRICS = {
    "ratio": Metric("", "mean probability ratio p_new / p_old"),
    "clip_fraction": Metric("fraction", "tokens whose ratio, or values whose change, was clipped"),
    "kl": Metric("nats", "KL(old || new) per token, by the k3 estimator, which is never negative"),
    "accuracy": Metric(
        "fraction",
        "pairs in which the chosen response has the higher reward; kto: responses on the right side of the KL; classification: "
        "samples whose label is right (of several labels: labels that are right)",
    ),
    "reward_chosen": Metric(
        "",
        "mean reward of chosen responses (dpo: beta times the log-ratio to the reference; simpo: beta times the mean "
        "log-probability)",
    ),
    "reward_rejected": Metric("", "mean reward of rejected responses"),
    "reward_margin": Metric("", "bradley_terry: mean difference of the rewards of a pair"),
    "reward_mean": Metric("", "bradley_terry: mean reward of all responses"),
    "nll_chosen": Metric("nats", "mean negative log-likelihood per token of chosen responses"),
    "log_odds_ratio": Metric("", "mean log odds ratio of chosen to rejected responses"),
    "reference_point": Metric(
        "nats", "KL(policy || reference) of a sequence, as kto estimates it from mismatched responses"
    ),
    "value": Metric("", "mean value that the critic predicts"),
    "exact_match": Metric("fraction", "multi_label_classification: samples whose labels are all right"),
    "macro_f1": Metric(
        "fraction",
        "classification, held-out samples only: mean over labels that occur or are predicted of 2 TP / (2 TP + FP + FN)",
    ),
    "absolute_error": Metric("", "regression: mean absolute distance of a value from its label"),
    "teacher_mass": Metric("fraction", "mean probability that the teacher gives to its candidates of a position"),
    "student_mass": Metric("fraction", "mean probability that the model gives to the teacher's candidates"),
}
"""Metrics that built-in losses report beside the loss."""

POLICY = (importance_sampling, ppo, cispo, gspo, dro, stable_reinforce)
"""Losses of a policy, on responses with the sampler's log-probabilities and advantages."""

CLASSIFICATION = (single_label_classification, multi_label_classification, regression)
"""Losses of sequence classifiers, by transformers' names of what they learn."""

DISTILLATION = (forward_kl, reverse_kl, jsd)
"""Losses of a teacher's candidates."""

BUILT_IN: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", cross_entropy),
        *(Loss(loss.__name__, loss, requires=("old_logprobs", "advantages")) for loss in POLICY),
        Loss("dpo", dpo, per="pair", requires=("ref_logprobs",)),
        Loss("orpo", orpo, per="pair"),
        Loss("simpo", simpo, per="pair"),
        Loss("kto", kto, per="sample", requires=("ref_logprobs", "label")),
        Loss("value", value, requires=("returns",), of="values"),
        Loss("clipped_value", clipped_value, requires=("returns", "old_values"), of="values"),
        Loss("bradley_terry", bradley_terry, per="pair", of="values"),
        *(Loss(loss.__name__, loss, per="sample", requires=("label",), of="values") for loss in CLASSIFICATION),
        *(Loss(loss.__name__, loss, requires=("candidates",)) for loss in DISTILLATION),
    )
}


_by_name: dict[str, Loss] = dict(BUILT_IN)


def register_loss(loss: Loss) -> Loss:
    """Register a loss under its name, for use by name: ``forward_backward(samples, loss.name)``.

    Every rank registers the same losses, for example when the module that defines them is imported. Registering a loss again
    has no effect.

    Returns:
        The loss.

    Raises:
        ConfigError: another loss has that name.
    """
    if not isinstance(loss, Loss):
        raise ConfigError(f"register_loss takes a megascend.Loss, got {type(loss).__name__}")
    if not loss.name:
        raise ConfigError("register_loss: the loss has no name")
    if _by_name.setdefault(loss.name, loss) != loss:
        raise ConfigError(f"register_loss: another loss is called {loss.name!r}; names in use: {', '.join(_by_name)}")
    for names in (LOSSES, POLICY_LOSSES):
        if loss.name not in names:
            names.append(loss.name)
    return loss


def resolve(loss: str | Loss | LossFunction) -> Loss:
    """Return the :class:`Loss` for a name, a Loss, or a plain per-token callable.

    Raises:
        ConfigError: the name is unknown; the message lists the registered names.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in _by_name:
            raise ConfigError(
                f"unknown loss {loss!r}; known by name: {', '.join(_by_name)}. Pass a callable, or register yours on every rank "
                "(megascend.register_loss)"
            )
        return _by_name[loss]
    if callable(loss):
        return Loss(getattr(loss, "__name__", type(loss).__name__), loss)
    raise ConfigError(f"a loss is a name, a megascend.Loss or a callable, got {type(loss).__name__}")


def split_output(loss: Loss, output: Any, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Split a loss function's return value into values and metrics and check their shapes."""
    values, metrics = output if isinstance(output, tuple) else (output, {})
    for name, tensor in {"loss": values, **metrics}.items():
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"loss {loss.name!r} returned {name} as {type(tensor).__name__}; per={loss.per!r} needs a tensor of shape "
                f"({count},)"
            )
        if tuple(tensor.shape) != (count,):
            raise DataError(
                f"loss {loss.name!r} returned {name} of shape {tuple(tensor.shape)}; per={loss.per!r} needs ({count},)"
            )
    return values, metrics
