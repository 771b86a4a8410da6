"""Output heads that learn from a teacher, on the GPU: values and gradients against plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascend.training.kernels.linear_divergence import TeacherDivergence, linear_divergence
from megascend.training.kernels.linear_logprobs import linear_logprobs
from megascend.training.kernels.softmax import VocabShard

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

TOKENS, HIDDEN, TEACHER_HIDDEN, SLOTS, BETA = 300, 64, 96, 9, 0.3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the relative norm of the difference. Both compute from the same rounded inputs."""


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)


def assert_close(names: str, actual: Any, expected: Any, dtype: torch.dtype) -> None:
    for name, value, reference in zip(names.split(), actual, expected, strict=True):
        error = float((value.detach().double() - reference.detach()).norm() / reference.detach().norm())
        assert error < BOUNDS[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("vocabulary", [37, 20001])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_divergence_from_a_teacher(kind: Any, dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = normal(generator, TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (0.3 * normal(generator, vocabulary, HIDDEN)).to(dtype).requires_grad_()
    states = normal(generator, TOKENS, TEACHER_HIDDEN).to(dtype)
    teacher = (0.3 * normal(generator, vocabulary, TEACHER_HIDDEN)).to(dtype)
    targets = torch.randint(vocabulary, (TOKENS,), generator=generator, device="cuda")
    grads = normal(generator, 2, TOKENS)

    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_p = (exact_hidden @ exact_weight.t()).log_softmax(1)
    log_q = (states.double() @ teacher.double().t()).log_softmax(1)
    log_m = (BETA * log_q.exp() + (1 - BETA) * log_p.exp()).log()
    forward, reverse = (log_q.exp() * (log_q - log_p)).sum(1), (log_p.exp() * (log_p - log_q)).sum(1)
    mixed = BETA * (log_q.exp() * (log_q - log_m)).sum(1) + (1 - BETA) * (log_p.exp() * (log_p - log_m)).sum(1)
    expected = (
        log_p.gather(1, targets[:, None])[:, 0],
        {"forward_kl": forward, "reverse_kl": reverse, "jsd": mixed}[kind],
    )
    (grads * torch.stack(expected)).sum().backward()

    outputs = linear_divergence(
        hidden, weight, targets, VocabShard(0, vocabulary), states, TeacherDivergence(kind, teacher, BETA)
    )
    (grads.float() * torch.stack(outputs)).sum().backward()
    assert_close(
        "logprobs divergence hidden weight",
        (*outputs, hidden.grad, weight.grad),
        (*expected, exact_hidden.grad, exact_weight.grad),
        dtype,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocabulary", [37, 20001])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_candidates_and_entropy(dtype: torch.dtype, vocabulary: int, temperature: float) -> None:
    """Compute log-probabilities of further tokens, some of which are the target and some unused."""
    generator = torch.Generator("cuda").manual_seed(5)
    hidden = normal(generator, TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (0.3 * normal(generator, vocabulary, HIDDEN)).to(dtype).requires_grad_()
    ids = torch.rand(TOKENS, vocabulary, generator=generator, device="cuda").topk(SLOTS).indices
    targets = torch.randint(vocabulary, (TOKENS,), generator=generator, device="cuda")
    targets[::3] = ids[::3, 0]
    ids[::4, 3:] = -1
    ids[5] = -1
    grads, candidate_grads = normal(generator, 2, TOKENS), normal(generator, TOKENS, SLOTS)

    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_p = (exact_hidden @ exact_weight.t() / temperature).log_softmax(1)
    selected = torch.where(ids >= 0, log_p.gather(1, ids.clamp_min(0)), 0.0)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), selected
    ((grads * torch.stack(expected[:2])).sum() + (candidate_grads * selected).sum()).backward()

    outputs = linear_logprobs(
        hidden,
        weight,
        targets,
        VocabShard(0, vocabulary),
        entropy=True,
        candidates=ids,
        temperature=temperature,
    )
    logprobs, entropy, values = outputs
    assert entropy is not None
    assert values is not None
    ((grads.float() * torch.stack([logprobs, entropy])).sum() + (candidate_grads.float() * values).sum()).backward()
    assert_close(
        "logprobs entropy candidates hidden weight",
        (*outputs, hidden.grad, weight.grad),
        (*expected, exact_hidden.grad, exact_weight.grad),
        dtype,
    )
