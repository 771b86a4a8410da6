"""ORPO, SimPO and KTO: value and gradient compared with the papers' formulas in float64, written out for one response."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascend.training.batch.loss import Loss, LossInputs
from megascend.training.batch.loss_call import LossCall
from megascend.training.batch.losses import BUILT_IN

WEIGHTS = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.5, 1.0])
"""Four responses of 3, 2, 2 and 2 tokens; the first of the first two is a prompt's."""
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
PAIRS = torch.tensor([[0, 1], [3, 2]])
LABELS = torch.tensor([1, 0, 0, 1])
LOGPROBS = torch.tensor([-9.0, -1.5, -0.25, -9.0, -3.0, -0.75, -2.0, -0.125, -1.0])
REFERENCE = torch.tensor([-8.0, -1.0, -0.5, -8.0, -2.5, -0.5, -2.5, -0.5, -1.25])


def evaluate(loss: Loss, logprobs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the values of a loss, their gradient, and its metrics."""
    inputs = LossInputs(
        torch.zeros(len(logprobs), dtype=torch.int64),
        WEIGHTS,
        SAMPLE,
        4,
        PAIRS,
        lambda values: values,
        ref_logprobs=REFERENCE,
        labels=LABELS,
    )
    result = LossCall(loss).evaluate(logprobs, None, inputs, 1.0, torch.zeros(len(logprobs), dtype=torch.bool))
    assert result is not None
    metrics = dict(result.metrics)
    return metrics.pop("loss"), result.scores, metrics


def responses(values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return values and weights of each response's tokens."""
    return [(values[number == SAMPLE], WEIGHTS[number == SAMPLE].to(values)) for number in range(4)]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def means(logprobs: Tensor) -> list[Tensor]:
    return [(values * weights).sum() / weights.sum() for values, weights in responses(logprobs)]


def orpo_in_float64(logprobs: Tensor, beta: float) -> Tensor:
    """Return, for each pair, equation 6: L_SFT + lambda L_OR, with odds = P / (1 - P)."""
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means(logprobs)]
    return torch.stack(
        [
            -means(logprobs)[chosen] - beta * torch.log(sigmoid(torch.log(odds[chosen] / odds[rejected])))
            for chosen, rejected in PAIRS.tolist()
        ]
    )


def simpo_in_float64(logprobs: Tensor, beta: float, gamma: float) -> Tensor:
    """Return, for each pair, equation 6."""
    return torch.stack(
        [
            -torch.log(sigmoid(beta * means(logprobs)[chosen] - beta * means(logprobs)[rejected] - gamma))
            for chosen, rejected in PAIRS.tolist()
        ]
    )


def kto_in_float64(logprobs: Tensor, beta: float, desirable: float, undesirable: float, kl: float) -> Tensor:
    """Return, for each response, lambda_y - v(x, y) of equation 8."""
    values = []
    for (ratio, weights), label in zip(responses(logprobs - REFERENCE.double()), LABELS.tolist(), strict=True):
        reward = (ratio * weights).sum()
        factor = desirable if label else undesirable
        values.append(factor - factor * sigmoid(beta * (reward - kl) if label else beta * (kl - reward)))
    return torch.stack(values)


CASES = {
    "orpo": (orpo_in_float64, {"beta": 0.25}),
    "simpo": (simpo_in_float64, {"beta": 2.5, "gamma": 0.75}),
    "kto": (
        kto_in_float64,
        {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5, "kl": 0.625},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_the_papers_formula_in_float64(name: str) -> None:
    formula, settings = CASES[name]
    exact = LOGPROBS.double().requires_grad_()
    expected = formula(exact, *settings.values())
    # The step multiplies each unit by a factor: here 1.
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    values, scores, metrics = evaluate(BUILT_IN[name].with_settings(**settings), LOGPROBS)
    torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(scores.double(), gradient, rtol=2e-6, atol=1e-7)
    assert all(metric.isfinite().all() and len(metric) == len(values) for metric in metrics.values())


def test_metrics_tell_chosen_from_rejected_and_kl_from_reward() -> None:
    _, _, orpo = evaluate(BUILT_IN["orpo"], LOGPROBS)
    assert orpo["accuracy"].tolist() == [1.0, 1.0]
    assert orpo["nll_chosen"].tolist() == pytest.approx([0.875, (0.5 * 0.125 + 1.0) / 1.5])
    _, _, simpo = evaluate(BUILT_IN["simpo"].with_settings(beta=2.0), LOGPROBS)
    assert simpo["reward_rejected"].tolist() == pytest.approx([-6.0, -2.75])
    # Log-ratios of the responses: -0.25, -0.5, 0.25 and 0.4375.
    _, _, kto = evaluate(BUILT_IN["kto"].with_settings(kl=0.4), LOGPROBS)
    assert kto["accuracy"].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert kto["reference_point"].tolist() == pytest.approx([0.4] * 4)


@pytest.mark.parametrize("chosen", [0.0, -1e-9, -1e-4, -60.0, -2000.0])
@pytest.mark.parametrize("rejected", [0.0, -1e-4, -60.0, -2000.0])
def test_orpo_is_finite_at_both_ends_of_the_probabilities(chosen: float, rejected: float) -> None:
    logprobs = torch.tensor([rejected, chosen])[torch.tensor([1, 1, 1, 0, 0, 0, 0, 1, 1])]
    values, scores, metrics = evaluate(BUILT_IN["orpo"], logprobs)
    assert values.isfinite().all()
    assert scores.isfinite().all()
    assert all(metric.isfinite().all() for metric in metrics.values())
    if -60 < chosen < -1e-9 and -2000 < rejected < -1e-9:  # where the formula itself has digits in float64
        exact = logprobs.double().requires_grad_()
        expected = orpo_in_float64(exact, 0.1)
        torch.testing.assert_close(values.double(), expected.detach(), rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(scores.double(), torch.autograd.grad(expected.sum(), exact)[0], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_simpo_and_kto_are_finite_for_distant_models(shift: float) -> None:
    logprobs = LOGPROBS + torch.where(SAMPLE % 2 == 0, shift, 0.0)
    for name in ("simpo", "kto"):
        values, scores, _ = evaluate(BUILT_IN[name], logprobs)
        assert values.isfinite().all()
        assert scores.isfinite().all()
    # A response far on the wrong side costs its whole weight, and one far on the right side nothing.
    values, _, _ = evaluate(BUILT_IN["kto"], logprobs)
    side = 1.0 if shift < 0 else 0.0
    assert values[torch.tensor([0, 2])].tolist() == pytest.approx([side, 1 - side], abs=1e-12)
