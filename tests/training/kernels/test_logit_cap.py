"""Logits with a cap (Gemma's soft cap): values and gradients of every result of the head against plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascend.testing import run_distributed
from megascend.training.kernels import linear_logprobs as module
from megascend.training.kernels.linear_divergence import TeacherDivergence, linear_divergence
from megascend.training.kernels.linear_logprobs import gather_logits, linear_cross_entropy, linear_logprobs
from megascend.training.kernels.softmax import VocabShard

TOKENS, HIDDEN, VOCABULARY, CAP, TEACHER_CAP = 300, 16, 37, 5.0, 4.0
TEMPERATURES = (1.0, 0.6)


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return tensors whose products are up to 20, four times the cap, and more in some rows."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    values = {
        "hidden": normal(TOKENS, HIDDEN),
        "weight": normal(VOCABULARY, HIDDEN),
        "states": normal(TOKENS, HIDDEN),
        "teacher": normal(VOCABULARY, HIDDEN),
        "grads": normal(2, TOKENS),
        "candidate_grads": normal(TOKENS, 2),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
        "candidates": torch.stack([torch.randperm(VOCABULARY, generator=generator)[:2] for _ in range(TOKENS)]),
    }
    values["hidden"][::7] *= 3
    return values


def leaves(values: dict[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    return [values[name].double().clone().requires_grad_() for name in names]


def capped(product: torch.Tensor, cap: float = CAP) -> torch.Tensor:
    return cap * torch.tanh(product / cap)


def scores(values: dict[str, torch.Tensor], temperature: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return log-probabilities, entropies and candidates' log-probabilities, and gradients of hidden states and weight."""
    hidden, weight = leaves(values, "hidden", "weight")
    log_p = (capped(hidden @ weight.t()) / temperature).log_softmax(1)
    logprobs = log_p.gather(1, values["targets"][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    selected = log_p.gather(1, values["candidates"])
    grads = values["grads"].double()
    total = (grads[0] * logprobs + grads[1] * entropy).sum()
    (total + (values["candidate_grads"].double() * selected).sum()).backward()
    return [logprobs.detach(), entropy.detach(), selected.detach()], gradients(hidden, weight)


def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def assert_close(actual: Any, expected: torch.Tensor, bound: float) -> None:
    assert float((actual.detach().double() - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_logprobs_entropies_and_candidates_are_those_of_capped_logits(world_size: int, temperature: float) -> None:
    values = inputs()
    per_rank = -(-VOCABULARY // world_size) + 1
    padding = torch.full((per_rank * world_size - VOCABULARY, HIDDEN), 9.0, dtype=torch.float64)
    padded = torch.cat([values["weight"], padding])

    def on_rank() -> list[torch.Tensor]:
        group, rank = (dist.group.WORLD, dist.get_rank()) if world_size > 1 else (None, 0)
        shard = VocabShard.for_rank(VOCABULARY, per_rank, rank, group, CAP)
        hidden = values["hidden"].clone().requires_grad_()
        weight = padded[rank * per_rank :][:per_rank].clone().requires_grad_()
        logprobs, entropy, selected = linear_logprobs(
            hidden, weight, values["targets"], shard, True, candidates=values["candidates"], temperature=temperature
        )
        assert entropy is not None
        assert selected is not None
        total = (values["grads"][0] * logprobs + values["grads"][1] * entropy).sum()
        (total + (values["candidate_grads"] * selected).sum()).backward()
        return [logprobs.detach(), entropy.detach(), selected.detach(), *gradients(hidden, weight)]

    ranks = run_distributed(on_rank, world_size, timeout_s=120)
    expected, (hidden_grad, weight_grad) = scores(values, temperature)
    for rank in ranks:
        for actual, value in zip(rank[:3], expected, strict=True):
            assert_close(actual, value, 1e-6)  # statistics are fp32
    assert_close(torch.stack([rank[3] for rank in ranks]).sum(0), hidden_grad, 1e-6)
    assert_close(torch.cat([rank[4] for rank in ranks])[:VOCABULARY], weight_grad, 1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_cross_entropy_has_the_gradient_of_capped_logits(
    dtype: torch.dtype, bound: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)  # chunks of 128 tokens, the last one shorter
    values = inputs(dtype)
    coefficients = values["grads"][0].float().abs()
    hidden, weight = (values[name].clone().requires_grad_() for name in ("hidden", "weight"))
    shard = VocabShard(0, VOCABULARY, cap=CAP)
    total, logprobs = linear_cross_entropy(
        hidden, weight, values["targets"], coefficients, shard, temperature=temperature
    )
    total.backward()
    exact_hidden, exact_weight = leaves(values, "hidden", "weight")
    log_p = (capped(exact_hidden @ exact_weight.t()) / temperature).log_softmax(1)
    expected = log_p.gather(1, values["targets"][:, None])[:, 0]
    (-coefficients.double() * expected).sum().backward()
    exact = (expected.detach(), *gradients(exact_hidden, exact_weight))
    for actual, value in zip((logprobs, hidden.grad, weight.grad), exact, strict=True):
        assert_close(actual, value, bound)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradients_in_bf16_are_as_near_as_those_of_plain_operations(temperature: float) -> None:
    """Most logits are near the cap, where the derivative depends on the last bits of tanh."""
    values = inputs(torch.bfloat16)
    coefficients = values["grads"][0].float().abs()

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = capped(hidden @ weight.t()) / temperature
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
        return (-coefficients * log_p.gather(1, values["targets"][:, None])[:, 0]).sum()

    def fused(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shard = VocabShard(0, VOCABULARY, cap=CAP)
        return linear_cross_entropy(hidden, weight, values["targets"], coefficients, shard, temperature=temperature)[0]

    def computed(loss: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [values[name].to(dtype, copy=True).requires_grad_() for name in ("hidden", "weight")]
        loss(*tensors).backward()
        return [gradient.double() for gradient in gradients(*tensors)]

    exact, rounded, actual = (
        computed(loss, dtype)
        for loss, dtype in ((plain, torch.float64), (plain, torch.bfloat16), (fused, torch.bfloat16))
    )
    for ours, others, value in zip(actual, rounded, exact, strict=True):
        assert float((ours - value).norm()) <= float((others - value).norm())


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_divergence_compares_capped_logits_of_both_models(kind: Any) -> None:
    values, beta = inputs(), 0.3
    hidden, weight = (values[name].clone().requires_grad_() for name in ("hidden", "weight"))
    outputs = linear_divergence(
        hidden,
        weight,
        values["targets"],
        VocabShard(0, VOCABULARY, cap=CAP),
        values["states"],
        TeacherDivergence(kind, values["teacher"], beta, TEACHER_CAP),
    )
    (values["grads"] * torch.stack(outputs)).sum().backward()
    exact_hidden, exact_weight = leaves(values, "hidden", "weight")
    log_p = capped(exact_hidden @ exact_weight.t()).log_softmax(1)
    log_q = capped(values["states"] @ values["teacher"].t(), TEACHER_CAP).log_softmax(1)

    def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(1)

    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    value = {
        "forward_kl": lambda: kl(log_q, log_p),
        "reverse_kl": lambda: kl(log_p, log_q),
        "jsd": lambda: beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m),
    }[kind]()
    logprobs = log_p.gather(1, values["targets"][:, None])[:, 0]
    (values["grads"][0] * logprobs + values["grads"][1] * value).sum().backward()
    expected = (logprobs.detach(), value.detach(), *gradients(exact_hidden, exact_weight))
    for actual, exact in zip((*outputs, hidden.grad, weight.grad), expected, strict=True):
        assert_close(actual, exact, 1e-12)


def test_logits_are_capped() -> None:
    values = inputs(torch.float32)
    logits = gather_logits(values["hidden"], values["weight"], VocabShard(0, VOCABULARY, cap=CAP))
    assert_close(logits, capped(values["hidden"].double() @ values["weight"].double().t()), 1e-6)
