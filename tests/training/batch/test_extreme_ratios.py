"""Losses at extreme ratios, compared with float64 autograd of their formulas; any values at tokens of weight 0."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megascend.training.batch.loss import Loss, LossInputs
from megascend.training.batch.loss_call import LossCall
from megascend.training.batch.losses import BUILT_IN, CLASSIFICATION

LARGEST = torch.finfo(torch.float32).max
DIFFERENCES = [0.0, 0.1, 0.5, 3.0, 40.0, 80.0, 88.0, 88.7, 88.8, 91.0, 104.0, 110.0, 800.0, 2000.0]
ADVANTAGES = [0.0, 1.5, -1.5, 0.25, -2.5, 1e-10, -1e-10, 1e-30, -1e-30, 1e20, -1e20, 1e30, -1e30, 3e38, -3e38]
LOGPROBS = [-0.01, -0.5, -2100.0]
GRID = [
    (logprob, logprob - sign * difference, advantage)
    for logprob, difference, sign, advantage in itertools.product(LOGPROBS, DIFFERENCES, (1, -1), ADVANTAGES)
]


def exp(log_ratio: Tensor) -> Tensor:
    """Exponentiate in float64 with the gradient of exp, clamped to e^700, below float64's limit."""
    return torch.exp(log_ratio - (log_ratio - log_ratio.clamp(max=700.0)).detach())


def clip_surrogate(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    ratio = exp(log_ratio)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


FORMULAS = {
    "importance_sampling": lambda new, old, advantage: -exp(new - old) * advantage,
    "ppo": lambda new, old, advantage: clip_surrogate(new - old, advantage, 0.2, 0.2),
    "gspo": lambda new, old, advantage: clip_surrogate(new - old, advantage, 3e-4, 4e-4),
    "cispo": lambda new, old, advantage: -exp((new - old).detach()).clamp(0.8, 1.2) * advantage * new,
    "dro": lambda new, old, advantage: 0.025 * (new - old) ** 2 - new * advantage,
    "stable_reinforce": lambda new, old, advantage: (
        -exp((new - old).detach()).clamp(max=2.0) * (advantage - 0.01 * (new - old).detach()) * new
    ),
}
"""Formulas for single tokens; for gspo each token is a sequence."""
POLICY_LOSSES = [name for name, loss in BUILT_IN.items() if "advantages" in loss.requires]


def inputs_of(count: int, **fields: object) -> LossInputs:
    by_name = {
        "targets": torch.zeros(count, dtype=torch.int64),
        "weights": torch.ones(count),
        "sample": torch.arange(count),
        "sample_count": count,
        "pairs": torch.zeros(0, 2, dtype=torch.int64),
        "reduce_context": lambda values: values,
        "last": torch.arange(count),
    }
    return LossInputs(**(by_name | fields))  # type: ignore[arg-type]


def evaluate(loss: Loss, scores: Tensor, inputs: LossInputs, entropy: Tensor | None = None):
    call = LossCall(loss)
    result = call.evaluate(scores, entropy, inputs, 1.0, torch.zeros(len(scores), dtype=torch.bool))
    assert result is not None, call.problem
    return result


def assert_same(values: Tensor, reference: Tensor, rel: float = 1e-4) -> None:
    """Assert equality where the reference fits into float32, and infinity with its sign elsewhere."""
    overflows = reference.abs() > LARGEST
    assert torch.equal(values[overflows].double(), reference[overflows].sign() * math.inf)
    torch.testing.assert_close(values[~overflows].double(), reference[~overflows], rtol=rel, atol=1e-37)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradient_and_value_equal_the_formulas_in_float64(name: str) -> None:
    new, old, advantages = (torch.tensor(column, dtype=torch.float32) for column in zip(*GRID, strict=True))
    exact = new.double().requires_grad_()
    reference = FORMULAS[name](exact, old.double(), advantages.double())
    (gradient,) = torch.autograd.grad(reference.sum(), exact)
    result = evaluate(BUILT_IN[name], new, inputs_of(len(GRID), old_logprobs=old, advantages=advantages))
    assert_same(result.scores, gradient)
    inside = gradient.abs() <= LARGEST  # otherwise the step is skipped, for any value
    assert_same(result.metrics["loss"][inside], reference.detach()[inside])
    for metric, values in result.metrics.items():
        assert metric == "loss" or values.isfinite().all(), metric
    ratio = exp(new.double() - old.double()).clamp(max=LARGEST)
    torch.testing.assert_close(result.metrics["ratio"].double(), ratio, rtol=2e-4, atol=1e-37)
    if "kl" in result.metrics:
        kl = (exp(new.double() - old.double()) - 1 - (new.double() - old.double())).clamp(max=LARGEST)
        torch.testing.assert_close(result.metrics["kl"].double(), kl, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_old_probability_of_0_is_no_nan(name: str) -> None:
    """Take the limit of ever smaller ones: 0 where the formula clips or the advantage is 0, else infinite with its sign."""
    advantages = torch.tensor([1.0, -1.0, 0.0])
    old = torch.full((3,), -math.inf)
    result = evaluate(BUILT_IN[name], torch.full((3,), -2.0), inputs_of(3, old_logprobs=old, advantages=advantages))
    expected = {
        "importance_sampling": [-math.inf, math.inf, 0.0],
        "ppo": [0.0, math.inf, 0.0],
        "gspo": [0.0, math.inf, 0.0],
        "cispo": [-1.2, 1.2, 0.0],
        "dro": [math.inf] * 3,
        "stable_reinforce": [math.inf] * 3,
    }[name]
    assert result.scores.tolist() == pytest.approx(expected)
    assert all(figure.isfinite().all() for metric, figure in result.metrics.items() if metric != "loss")


def test_ratio_without_an_upper_clip_is_no_nan() -> None:
    for name in ("ppo", "cispo", "gspo"):
        loss = BUILT_IN[name].with_settings(clip_high=math.inf)
        new, old = torch.zeros(3), torch.tensor([-100.0, -100.0, 0.0])
        result = evaluate(loss, new, inputs_of(3, old_logprobs=old, advantages=torch.tensor([1.0, 0.0, 1.0])))
        assert result.scores.tolist() == [-math.inf, 0.0, -1.0], name


def test_token_beyond_float32_of_a_sequence_takes_part_in_its_mean() -> None:
    """Check gspo: (95 + 0 + 1) / 3 = 32 is clipped for a positive advantage; else the gradient is e^32 / 3 per token."""
    old = torch.tensor([-95.0, 0.0, -1.0, -95.0, 0.0, -1.0])
    advantages = torch.tensor([1.0] * 3 + [-1.0] * 3)
    sample = torch.tensor([0, 0, 0, 1, 1, 1])
    inputs = inputs_of(6, old_logprobs=old, advantages=advantages, sample=sample, sample_count=2)
    result = evaluate(BUILT_IN["gspo"], torch.zeros(6), inputs)
    assert result.scores.tolist() == pytest.approx([0.0] * 3 + [math.exp(32.0)] * 3, rel=1e-5)


PAIRS = {"sample": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), "sample_count": 4, "pairs": torch.tensor([[0, 1], [3, 2]])}


@pytest.mark.parametrize("difference", [0.0, 50.0, 91.0, 2000.0, 1e30, 3e38])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dpo_equals_its_formula_in_float64(difference: float, sign: float) -> None:
    new = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0, -1.0, -2.0, -0.25])
    ref = new.clone()
    ref[1] -= sign * difference
    exact = new.double().requires_grad_()
    gap = exact - ref.double()
    totals = torch.stack([gap[2 * number : 2 * number + 2].sum() for number in range(4)])
    margins = 0.1 * torch.stack([totals[0] - totals[1], totals[3] - totals[2]])
    reference = -torch.nn.functional.logsigmoid(margins)
    (gradient,) = torch.autograd.grad(reference.sum(), exact)
    result = evaluate(BUILT_IN["dpo"], new, inputs_of(8, ref_logprobs=ref, **PAIRS))
    assert_same(result.scores, gradient)
    assert_same(result.metrics["loss"], reference.detach())
    assert all(figure.isfinite().all() for figure in result.metrics.values())


def test_reference_probability_of_0_settles_a_pair() -> None:
    ref = torch.zeros(8)
    ref[0], ref[4] = -math.inf, -math.inf  # of the chosen sample of the first pair, of the rejected one of the second
    result = evaluate(BUILT_IN["dpo"], torch.full((8,), -1.0), inputs_of(8, ref_logprobs=ref, **PAIRS))
    assert result.metrics["loss"].tolist() == [0.0, math.inf]
    assert result.scores.tolist() == pytest.approx([0.0] * 4 + [0.1, 0.1, -0.1, -0.1])
    assert all(figure.isfinite().all() for metric, figure in result.metrics.items() if metric != "loss")


@pytest.mark.parametrize("size", [1.0, 91.0, 1e10, 1e19, 1e25, 1e38])
def test_losses_of_values_equal_their_formulas_in_float64(size: float) -> None:
    grid = list(itertools.product([0.0, size, -size], repeat=3))
    values, old, returns = (torch.tensor(column, dtype=torch.float32) for column in zip(*grid, strict=True))
    exact = values.double().requires_grad_()
    clipped = old.double() + (exact - old.double()).clamp(-0.2, 0.2)
    larger = torch.maximum((exact - returns.double()) ** 2, (clipped - returns.double()) ** 2) / 2
    for name, reference in (("value", (exact - returns.double()) ** 2 / 2), ("clipped_value", larger)):
        (gradient,) = torch.autograd.grad(reference.sum(), exact, retain_graph=True)
        result = evaluate(BUILT_IN[name], values, inputs_of(len(grid), returns=returns, old_values=old))
        if name == "clipped_value":
            # Exclude (near) ties of the formula in float64, where float32 cannot represent old + 0.2 as different from old.
            distinct = (
                (exact - returns.double()).abs() - (clipped - returns.double()).abs()
            ).detach().abs() > 1e-6 * size
            distinct |= (exact - old.double()).abs().detach() <= 0.2
            scores, gradient = result.scores[distinct], gradient[distinct]
        else:
            scores = result.scores
        assert_same(scores, gradient)
        assert_same(result.metrics["loss"], reference.detach(), rel=1e-3)
        assert all(figure.isfinite().all() for metric, figure in result.metrics.items() if metric != "loss")


@pytest.mark.parametrize("size", [1.0, 91.0, 2000.0, 3e38])
def test_bradley_terry_equals_its_formula_in_float64(size: float) -> None:
    values = torch.tensor([size, -size, -size, size])
    exact = values.double().requires_grad_()
    margins = torch.stack([exact[0] - exact[1], exact[2] - exact[3]])
    reference = -torch.nn.functional.logsigmoid(margins)
    (gradient,) = torch.autograd.grad(reference.sum(), exact)
    pairs = torch.tensor([[0, 1], [2, 3]])
    result = evaluate(BUILT_IN["bradley_terry"], values, inputs_of(4, pairs=pairs))
    assert_same(result.scores, gradient)
    assert_same(result.metrics["loss"], reference.detach())


def test_bradley_terry_subtracts_margins_and_centers_rewards() -> None:
    values, margins = torch.tensor([1.5, 0.25, -0.5, 0.75]), torch.tensor([0.5, 0.5, 0.25, 0.25])
    inputs = inputs_of(4, pairs=torch.tensor([[0, 1], [2, 3]]), extra={"margin": margins})
    result = evaluate(BUILT_IN["bradley_terry"].with_settings(center_coefficient=0.125), values, inputs)
    first = math.log1p(math.exp(0.5 - (1.5 - 0.25))) + 0.125 * (1.5 + 0.25) ** 2
    second = math.log1p(math.exp(0.25 - (-0.5 - 0.75))) + 0.125 * (-0.5 + 0.75) ** 2
    assert result.metrics["loss"].tolist() == pytest.approx([first, second])
    assert result.metrics["accuracy"].tolist() == [1.0, 0.0]
    assert result.metrics["reward_margin"].tolist() == [1.25, -1.25]
    assert result.metrics["reward_mean"].tolist() == [0.875, 0.125]
    # d loss / d chosen = -sigmoid(margin - difference) + 2 c (chosen + rejected)
    assert float(result.scores[0]) == pytest.approx(-1 / (1 + math.exp(0.75)) + 2 * 0.125 * 1.75)


# --- tokens of weight 0 ---


def covariance(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """Compute a custom loss that combines all tokens without regard to their weights."""
    advantages = inputs.advantages - inputs.advantages.mean()
    return (
        -advantages * torch.exp(logprobs) * logprobs.logsumexp(0) + inputs.extra["shift"].mean() * inputs.entropy.sum()
    )


LOSSES = {name: loss for name, loss in BUILT_IN.items() if "candidates" not in loss.requires} | {
    "covariance": Loss("covariance", covariance, entropy=True)
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_token_of_weight_0_contributes_nothing(name: str, junk: float) -> None:
    loss, generator = LOSSES[name], torch.Generator().manual_seed(0)
    weights = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.0, 2.0])
    fields = ["old_logprobs", "advantages", "ref_logprobs", "returns", "old_values"]

    def evaluate_with(value: float):
        def column() -> Tensor:
            return torch.where(weights != 0, torch.randn(8, generator=generator.manual_seed(len(seeds))), value)

        seeds: list[str] = []
        by_name = {}
        for field in [*fields, "shift", "scores", "entropy"]:
            seeds.append(field)
            by_name[field] = column()
        scores, entropy, shift = by_name.pop("scores"), by_name.pop("entropy"), by_name.pop("shift")
        inputs = inputs_of(8, weights=weights, extra={"shift": shift}, **by_name, **PAIRS)
        inputs.last = torch.tensor([1, 3, 5, 7])
        inputs.labels = torch.tensor([1, 0, 0, 1])
        if loss.function in CLASSIFICATION:
            scores = torch.stack([scores, 0.5 * scores], 1)  # of two labels
        if loss.name in ("multi_label_classification", "regression"):
            inputs.labels = torch.nn.functional.one_hot(inputs.labels, 2).float()
        inputs.entropy = entropy if loss.entropy else None
        return evaluate(loss, scores, inputs, entropy if loss.entropy else None)

    result, reference = evaluate_with(junk), evaluate_with(0.0)
    assert result.scores.isfinite().all()
    assert result.scores[weights == 0].count_nonzero() == 0
    torch.testing.assert_close(result.scores, reference.scores, rtol=0, atol=0)
    if result.entropy is not None:
        torch.testing.assert_close(result.entropy, reference.entropy, rtol=0, atol=0)
    assert result.scores.count_nonzero() > 0


@pytest.mark.parametrize("name", [name for name, loss in BUILT_IN.items() if "candidates" in loss.requires])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_candidates_of_weight_0_contribute_nothing(name: str, junk: float) -> None:
    weights = torch.tensor([1.0, 0.0, 0.5, 0.0])
    ids = torch.tensor([[0, 1, -1]] * 4)
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 4, 5, generator=generator).log_softmax(-1)[..., :3].masked_fill(ids < 0, 0.0)

    def gradient(value: float) -> Tensor:
        logprobs = torch.where(weights[:, None] != 0, student, value)
        inputs = inputs_of(4, weights=weights, candidate_ids=ids, teacher_logprobs=teacher)
        call = LossCall(BUILT_IN[name])
        result = call.evaluate(torch.zeros(4), None, inputs, 1.0, torch.tensor([False, False, False, True]), logprobs)
        assert result is not None, call.problem
        assert result.candidates is not None
        assert result.scores.count_nonzero() == 0
        return result.candidates

    gradients = gradient(junk)
    assert torch.equal(gradients, gradient(0.0))
    assert gradients.isfinite().all()
    assert (gradients != 0).tolist() == [[True, True, False], [False] * 3] * 2


def test_figures_of_a_cross_entropy_see_finite_values_at_weight_0() -> None:
    def watched(logprobs: Tensor, inputs: LossInputs):
        return -logprobs, {"far": (logprobs - inputs.ref_logprobs).mean().expand(len(logprobs))}

    inputs = inputs_of(3, weights=torch.tensor([0.0, 1.0, 1.0]), ref_logprobs=torch.tensor([math.nan, -1.0, -2.0]))
    call = LossCall(Loss("watched", watched, is_cross_entropy=True))
    logprobs = torch.tensor([-math.inf, -1.0, -1.0])
    figures = call.observe(logprobs, inputs, torch.zeros(3, dtype=torch.bool))
    assert figures is not None
    assert figures["far"].tolist() == pytest.approx([1 / 3] * 3)
