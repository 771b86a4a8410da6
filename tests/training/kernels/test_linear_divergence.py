"""Divergence from a teacher over the whole vocabulary: values and gradients against plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascend.testing import run_distributed
from megascend.training.kernels import linear_divergence as module
from megascend.training.kernels.linear_divergence import TeacherDivergence, linear_divergence
from megascend.training.kernels.low_rank import LowRank
from megascend.training.kernels.softmax import VocabShard

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCABULARY, BETA = 300, 16, 24, 37, 0.3
KINDS = ("forward_kl", "reverse_kl", "jsd")


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of both models, targets, and gradients of both outputs; some distributions have logits of 100."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    values = {
        "hidden": normal(TOKENS, HIDDEN),
        "weight": normal(VOCABULARY, HIDDEN),
        "states": normal(TOKENS, TEACHER_HIDDEN),
        "teacher": normal(VOCABULARY, TEACHER_HIDDEN),
        "grads": normal(2, TOKENS),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
    }
    values["hidden"][::7] *= 6
    values["states"][::5] *= 6
    return values


def reference(values: dict[str, torch.Tensor], kind: str, added: torch.Tensor | float = 0.0) -> list[torch.Tensor]:
    """Return both outputs and the gradients of hidden states and weight, in float64 by torch's own divergence."""
    hidden, weight = (values[name].double().clone().requires_grad_() for name in ("hidden", "weight"))
    log_p = (hidden @ weight.t() + added).log_softmax(1)
    log_q = (values["states"].double() @ values["teacher"].double().t()).log_softmax(1)

    def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(1)

    log_m = (BETA * log_q.exp() + (1 - BETA) * log_p.exp()).log()
    value = {
        "forward_kl": lambda: kl(log_q, log_p),
        "reverse_kl": lambda: kl(log_p, log_q),
        "jsd": lambda: BETA * kl(log_q, log_m) + (1 - BETA) * kl(log_p, log_m),
    }[kind]()
    logprobs = log_p.gather(1, values["targets"][:, None])[:, 0]
    grads = values["grads"].double()
    (grads[0] * logprobs + grads[1] * value).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [logprobs.detach(), value.detach(), hidden.grad, weight.grad]


def assert_close(actual: Any, expected: torch.Tensor, bound: float) -> None:
    assert float((actual.detach().double() - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_divergence_and_gradients_are_those_of_plain_pytorch(
    kind: Any, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)  # chunks of 128 tokens, the last one shorter
    values = inputs(dtype)
    hidden, weight = (values[name].clone().requires_grad_() for name in ("hidden", "weight"))
    divergence = TeacherDivergence(kind, values["teacher"], BETA)
    outputs = linear_divergence(
        hidden, weight, values["targets"], VocabShard(0, VOCABULARY), values["states"], divergence
    )
    (values["grads"].to(outputs[0].dtype) * torch.stack(outputs)).sum().backward()
    for actual, expected in zip((*outputs, hidden.grad, weight.grad), reference(values, kind), strict=True):
        assert_close(actual, expected, bound)


@pytest.mark.parametrize("world_size", [2, 4])
def test_divided_vocabulary_with_padding_has_the_same_values_and_gradients(world_size: int) -> None:
    """Divide 37 rows over the ranks, the last of which may have padding only; padding rows are large values."""
    values = inputs(torch.float64)
    per_rank = -(-VOCABULARY // world_size) + 3
    padded = torch.cat(
        [values["weight"], torch.full((per_rank * world_size - VOCABULARY, HIDDEN), 9.0, dtype=torch.float64)]
    )

    def on_rank() -> list[list[torch.Tensor]]:
        shard = VocabShard.for_rank(VOCABULARY, per_rank, dist.get_rank(), dist.group.WORLD)
        teacher = values["teacher"][shard.start : shard.start + shard.rows]
        results = []
        for kind in KINDS:
            hidden = values["hidden"].clone().requires_grad_()
            weight = padded[dist.get_rank() * per_rank :][:per_rank].clone().requires_grad_()
            outputs = linear_divergence(
                hidden, weight, values["targets"], shard, values["states"], TeacherDivergence(kind, teacher, BETA)
            )
            (values["grads"] * torch.stack(outputs)).sum().backward()
            assert hidden.grad is not None
            assert weight.grad is not None
            results.append([*(output.detach() for output in outputs), hidden.grad, weight.grad])
        return results

    ranks = run_distributed(on_rank, world_size, timeout_s=120)
    for number, kind in enumerate(KINDS):
        logprobs, value, hidden_grad, weight_grad = reference(values, kind)
        for rank in ranks:
            assert_close(rank[number][0], logprobs, 1e-12)
            assert_close(rank[number][1], value, 1e-12)
        # The caller sums the parts of the hidden states' gradient.
        assert_close(torch.stack([rank[number][2] for rank in ranks]).sum(0), hidden_grad, 1e-12)
        weights = torch.cat([rank[number][3] for rank in ranks])
        assert_close(weights[:VOCABULARY], weight_grad, 1e-12)
        assert not bool(weights[VOCABULARY:].any())


def test_adapter_of_the_output_layer_gets_its_gradients() -> None:
    values = inputs(torch.float32)
    generator = torch.Generator().manual_seed(4)
    down, up = torch.randn(TOKENS, 3, generator=generator), torch.randn(1, 3, VOCABULARY, generator=generator)
    a, b = down.double().requires_grad_(), up[0].double().requires_grad_()
    expected = reference(values, "reverse_kl", a @ b)
    leaf = down.clone().requires_grad_()
    low_rank = LowRank(up, torch.zeros_like(up), ((0, slice(0, TOKENS)),))
    hidden, weight = values["hidden"].clone().requires_grad_(), values["weight"]
    divergence = TeacherDivergence("reverse_kl", values["teacher"])
    outputs = linear_divergence(
        hidden,
        weight,
        values["targets"],
        VocabShard(0, VOCABULARY),
        values["states"],
        divergence,
        down=leaf,
        lora_delta=low_rank,
    )
    (values["grads"] * torch.stack(outputs)).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    for actual, reference_value in zip(
        (*outputs, hidden.grad, leaf.grad, low_rank.grads[0]), (*expected[:3], a.grad, b.grad), strict=True
    ):
        assert_close(actual, reference_value, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_teacher_that_overflows_at_an_ignored_token_changes_no_gradient(kind: Any, value: float) -> None:
    values, ignored = inputs(torch.float64), [3, 200]
    values["grads"][:, ignored] = 0.0
    expected = reference(values, kind)
    values["states"][ignored] = value
    hidden, weight = (values[name].clone().requires_grad_() for name in ("hidden", "weight"))
    outputs = linear_divergence(
        hidden,
        weight,
        values["targets"],
        VocabShard(0, VOCABULARY),
        values["states"],
        TeacherDivergence(kind, values["teacher"], BETA),
    )
    learned = values["grads"] != 0
    torch.where(learned, values["grads"] * torch.stack(outputs), 0.0).sum().backward()
    for actual, gradient in zip((hidden.grad, weight.grad), expected[2:], strict=True):
        assert_close(actual, gradient, 1e-12)
