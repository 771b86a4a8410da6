"""The built-in losses against their formulas, in plain floats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import tensor

from megascend import Loss
from megascend.errors import ConfigError, DataError
from megascend.training.batch.loss import LossInputs, split_output
from megascend.training.batch.losses import BUILT_IN, dpo, resolve
from megascend.training.batch.policy_losses import stable_reinforce

OLD = [-1.5, -2.0, -0.25, -2.0]
ADVANTAGES = [1.0, -2.0, 0.5, -1.0]


def inputs(count: int = 4, **changes) -> LossInputs:
    settings = {
        "targets": torch.zeros(count, dtype=torch.int64),
        "weights": torch.ones(count),
        "sample": torch.zeros(count, dtype=torch.int64),
        "sample_count": 1,
        "pairs": torch.zeros(0, 2, dtype=torch.int64),
        "reduce_context": lambda values: values,
        "old_logprobs": tensor(OLD),
        "advantages": tensor(ADVANTAGES),
    }
    return LossInputs(**(settings | changes))


def test_settings_of_a_loss_go_by_name_and_make_equal_losses():
    wide = BUILT_IN["ppo"].with_settings(clip_high=0.28)
    arguments = inputs(1, old_logprobs=tensor([0.0]), advantages=tensor([2.0]))
    assert wide(tensor([1.0]), arguments)[0].item() == pytest.approx(-1.28 * 2)
    assert wide == BUILT_IN["ppo"].with_settings(clip_high=0.3).with_settings(clip_high=0.28) != BUILT_IN["ppo"]
    assert wide.describe() == "loss='ppo', clip_high=0.28"
    with pytest.raises(ConfigError, match="no setting 'beta'; it has: clip_low, clip_high"):
        wide.with_settings(beta=1.0)


def test_divisor_replaces_the_sum_of_weights():
    halved = replace(BUILT_IN["ppo"], divisor=8.0)
    assert halved.describe() == "loss='ppo', divisor=8.0"
    assert halved.effective_settings() == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    for options in ({"divisor": 0.0}, {"divisor": 2.0, "reduction": "sum"}):
        with pytest.raises(ConfigError, match="divisor is a number above 0 for losses with reduction='mean'"):
            replace(BUILT_IN["ppo"], **options)


def test_stable_reinforce_is_the_policy_gradient_with_a_penalty_for_leaving_the_sampler():
    """Compare, over all tokens the sampler may draw, with the gradient of E_pi[A] - c KL(pi || sampler) by autograd."""
    logits = tensor([0.3, -1.0, 0.7, 0.1], requires_grad=True)
    sampler = torch.log_softmax(tensor([-0.2, 0.4, 0.5, -1.0]), 0)
    policy = torch.log_softmax(logits, 0)
    advantages = tensor(ADVANTAGES)
    objective = (policy.exp() * advantages).sum() - 0.3 * (policy.exp() * (policy - sampler)).sum()
    expected = torch.autograd.grad(-objective, logits, retain_graph=True)[0]
    arguments = inputs(old_logprobs=sampler, advantages=advantages)
    values, metrics = stable_reinforce(policy, arguments, kl_coeff=0.3, max_ratio=100.0)
    gradient = torch.autograd.grad((sampler.exp() * values).sum(), logits)[0]
    assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert (sampler.exp() * metrics["kl"]).sum().item() == pytest.approx(
        (sampler.exp() * (sampler - policy)).sum().item()
    )


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_compares_the_weighted_sums_of_each_pair(beta):
    logprobs = tensor([-1.0, -2.0, -3.0, -0.5, -0.25, -4.0])
    reference = tensor([-1.5, -1.0, -2.0, -1.0, -0.5, -1.0])
    weights = tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.5])
    arguments = inputs(
        6,
        weights=weights,
        ref_logprobs=reference,
        sample=tensor([0, 0, 1, 1, 2, 3]),
        sample_count=4,
        pairs=tensor([[1, 0], [2, 3]]),  # samples 1 and 2 are the chosen ones
    )
    margins = [0.5, -1.0 + 0.5, 0.25, -1.5]
    values, metrics = dpo(logprobs, arguments, beta=beta)
    logits = [beta * (margins[1] - margins[0]), beta * (margins[2] - margins[3])]
    assert values.tolist() == pytest.approx([-math.log(1 / (1 + math.exp(-x))) for x in logits])
    assert metrics["accuracy"].tolist() == [0.0, 1.0]
    assert metrics["reward_chosen"].tolist() == pytest.approx([beta * margins[1], beta * margins[2]])
    assert metrics["reward_rejected"].tolist() == pytest.approx([beta * margins[0], beta * margins[3]])


def test_sums_per_sample_go_through_the_context_reduction():
    observed = []

    def reduce(values):
        observed.append(values.tolist())
        return values * 10

    arguments = inputs(
        3, weights=tensor([1.0, 2.0, 0.0]), sample=tensor([1, 0, 1]), sample_count=3, reduce_context=reduce
    )
    assert arguments.sum_per_sample(tensor([1.0, 3.0, 100.0])).tolist() == [60.0, 10.0, 0.0]
    assert observed == [[6.0, 1.0, 0.0]]


def test_a_loss_is_found_by_name_or_made_of_a_callable():
    assert resolve("ppo") is BUILT_IN["ppo"]
    assert resolve("dpo").per == "pair"

    def nll(logprobs, inputs):
        return -logprobs

    class Callable:
        def __call__(self, logprobs, inputs):
            return -logprobs

    for function, name in ((nll, "nll"), (Callable(), "Callable")):
        loss = resolve(function)
        assert (loss.name, loss.function, loss.per, loss.requires, loss.entropy) == (name, function, "token", (), False)
    loss = Loss("x", nll, per="pair")
    assert resolve(loss) is loss


def test_invalid_loss_raises_config_error():
    with pytest.raises(ConfigError, match=r"unknown loss 'hinge'; known: cross_entropy, .*, ppo, .*, dpo"):
        resolve("hinge")
    with pytest.raises(ConfigError, match=r"a loss is a name, a megascend\.Loss or a callable, got int"):
        resolve(3)


@pytest.mark.parametrize(
    ("output", "count", "words"),
    [
        (torch.tensor(1.0), 3, [r"'ppo' returned loss of shape \(\)", r"per='token' needs \(3,\)"]),
        (torch.ones(4), 3, [r"loss of shape \(4,\)"]),
        (1.0, 3, [r"returned loss as float; per='token' needs a tensor of shape \(3,\)"]),
        (torch.ones(3, 1), 3, [r"loss of shape \(3, 1\)"]),
        ((torch.ones(3), {"kl": torch.zeros(())}), 3, [r"returned kl of shape \(\)"]),
    ],
)
def test_output_of_another_shape_is_refused(output, count, words):
    for word in words:
        with pytest.raises(DataError, match=word):
            split_output(BUILT_IN["ppo"], output, count)


# --- distillation ---

TEACHER = [[0.6, 0.3, 0.05], [0.9, 0.0, 0.0], [0.2, 0.5, 0.0]]
STUDENT = [[0.2, 0.3, 0.1], [0.5, 0.2, 0.1], [0.3, 0.3, 0.2]]
IDS = [[4, 2, 7], [1, -1, -1], [0, 3, -1]]


def distillation_inputs(student: list[list[float]] = STUDENT) -> LossInputs:
    used = tensor(IDS) >= 0
    return inputs(
        3,
        candidate_ids=tensor(IDS),
        teacher_logprobs=torch.where(used, tensor(TEACHER).log(), 0.0),
        candidate_logprobs=torch.where(used, tensor(student).log(), 0.0).requires_grad_(),
    )


def test_distillation_reports_the_mass_of_the_candidates() -> None:
    _, metrics = BUILT_IN["forward_kl"](torch.zeros(3), distillation_inputs())
    assert metrics["teacher_mass"].tolist() == pytest.approx([0.95, 0.9, 0.7])
    assert metrics["student_mass"].tolist() == pytest.approx([0.6, 0.5, 0.6])


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_distillation_is_0_for_the_teacher_and_has_finite_gradients(name: str) -> None:
    arguments = distillation_inputs(TEACHER)
    values, _ = BUILT_IN[name](torch.zeros(3), arguments)
    assert values.tolist() == pytest.approx([0.0] * 3, abs=1e-7)
    values.sum().backward()
    assert arguments.candidate_logprobs.grad.isfinite().all()


def test_distillation_of_a_distribution_without_a_rest_is_the_plain_divergence() -> None:
    """1 minus a sum of 1 is rounding: the rest counts as equally small for both."""
    teacher, student = torch.randn(2, 5, 9).log_softmax(-1).unbind(0)
    ids = torch.arange(9).expand(5, -1)
    arguments = inputs(5, candidate_ids=ids, teacher_logprobs=teacher, candidate_logprobs=student)
    values, _ = BUILT_IN["forward_kl"](torch.zeros(5), arguments)
    torch.testing.assert_close(values, (teacher.exp() * (teacher - student)).sum(1), atol=1e-5, rtol=1e-4)


def test_jsd_refuses_its_limits() -> None:
    with pytest.raises(ConfigError, match=r"beta=1 is not between 0 and 1; forward_kl and reverse_kl are its limits"):
        BUILT_IN["jsd"].with_settings(beta=1.0)(torch.zeros(3), distillation_inputs())


@pytest.mark.parametrize("value", ["0.1", None, True, float("nan"), [0.1]])
def test_setting_that_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="loss 'ppo': clip_low must be a number"):
        resolve("ppo", {"clip_low": value})


def test_settings_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match="loss_settings must be a mapping of names to numbers, got list"):
        resolve("ppo", ["clip_low"])  # type: ignore[arg-type]
