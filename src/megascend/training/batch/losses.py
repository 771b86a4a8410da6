"""Built-in losses, their metrics, and the registry of losses by name.

Losses of a policy are in :mod:`megascend.training.batch.policy_losses`, the contract of all in
:mod:`megascend.training.batch.loss`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megascend.config.data import ProblemType
from megascend.config.registry import LOSSES
from megascend.errors import ConfigError
from megascend.training.batch import policy_losses
from megascend.training.batch.loss import LARGEST_METRIC, MARGIN, Loss, LossFunction, LossInputs
from megascend.training.batch.metrics import Metric
from megascend.training.kernels.linear_divergence import TeacherDivergence


def cross_entropy(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Negative log-likelihood of the targets."""
    return -logprobs


# --- preference pairs, and labelled responses ---


def dpo(logprobs: Tensor, inputs: LossInputs, beta: float = 0.1):
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7); needs ``ref_logprobs`` and complete pairs."""
    # Differences are summed, not sums subtracted: two sums over thousands of tokens would cancel most of their digits.
    margins = inputs.sum_per_sample(logprobs - inputs.ref_logprobs)
    chosen, rejected = margins[inputs.pairs[:, 0]], margins[inputs.pairs[:, 1]]
    logits = beta * (chosen - rejected)
    return -F.logsigmoid(logits), {
        "accuracy": (logits > 0).float(),
        # Finite: an infinite metric would spoil the average over all pairs.
        "reward_chosen": (beta * chosen.detach()).clamp(-LARGEST_METRIC, LARGEST_METRIC),
        "reward_rejected": (beta * rejected.detach()).clamp(-LARGEST_METRIC, LARGEST_METRIC),
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
    # Each branch gets only inputs for which it is exact: the other one's infinite gradient times 0 would be NaN.
    small = torch.where(near_zero, log_probability, -1.0)
    large = torch.where(near_zero, -1.0, log_probability)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


# --- critics and reward models ---


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
        "reward_margin": difference.detach().clamp(-LARGEST_METRIC, LARGEST_METRIC),
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


# --- metrics, and losses by name ---

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

BUILT_IN: dict[str, Loss] = {
    name: Loss(name, globals().get(name) or getattr(policy_losses, name), row.per, row.requires, of=row.of)
    for name, row in LOSSES.items()
}
LOSSES.update(BUILT_IN)

CLASSIFICATION = tuple(BUILT_IN[name].function for name in get_args(ProblemType))
"""Losses of sequence classifiers."""


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
    LOSSES.add(loss.name, loss)
    return loss


def resolve(loss: str | Loss | LossFunction, settings: Mapping[str, Any] | None = None) -> Loss:
    """Return the :class:`Loss` for a name, a Loss, or a plain per-token callable, with keyword arguments of its function.

    Raises:
        ConfigError: the name or a setting is unknown; the message lists those that exist.
    """
    if settings:
        if not isinstance(settings, Mapping):
            raise ConfigError(f"loss_settings must be a mapping of names to numbers, got {type(settings).__name__}")
        return resolve(loss).with_settings(**settings)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        return cast("Loss", LOSSES.require(loss))
    if callable(loss):
        return Loss(getattr(loss, "__name__", type(loss).__name__), loss)
    raise ConfigError(f"a loss is a name, a megascend.Loss or a callable, got {type(loss).__name__}")
