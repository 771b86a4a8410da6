"""flash-linear-attention's kernels as the Megatron engine calls them, against the reference functions of the CPU in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.reference_fla import convolution, delta_rule

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

LENGTHS = (200, 1, 63, 312)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)
HEADS, KEY, VALUE = 4, 128, 128


@pytest.fixture
def chunked() -> Any:
    """Return the kernels' delta rule. Its package uses the GPU when it is imported, which tests that fork must precede."""
    package = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs flash-linear-attention")
    return package.chunk_gated_delta_rule


def inputs() -> dict[str, Tensor]:
    """Return bf16 inputs of a packed row, with heads as wide as in Qwen3.5."""
    generator, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    tensors = {
        "q": delta_rule.l2norm(normal(HEADS, KEY)),
        "k": delta_rule.l2norm(normal(HEADS, KEY)),
        "v": normal(HEADS, VALUE),
        "beta": normal(HEADS).sigmoid(),
    }
    decay = -0.2 * torch.nn.functional.softplus(normal(HEADS))
    return {name: tensor.bfloat16() for name, tensor in tensors.items()} | {"g": decay}


def gradients(function: Any, tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs, and the inputs' gradients of a fixed sum of them."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    output = function(**leaves, **options)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.device)
    (output * weights).sum().backward()
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu().double() - expected).norm() / expected.norm())


def test_chunked_delta_rule_equals_the_reference(chunked: Any) -> None:
    exact = {name: tensor.double() for name, tensor in inputs().items()}
    expected, expected_gradients = gradients(delta_rule.chunk_gated_delta_rule, exact, cu_seqlens=ENDS)
    on_device = {name: tensor.cuda() for name, tensor in inputs().items()}
    output, actual = gradients(chunked, on_device, cu_seqlens=ENDS.cuda())
    errors = {"output": relative(output, expected)} | {
        name: relative(actual[name], gradient) for name, gradient in expected_gradients.items()
    }
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2e-2, errors


def test_convolution_and_norm_equal_the_reference() -> None:
    pytest.importorskip("fla", reason="needs flash-linear-attention")
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, sum(LENGTHS), 256, generator=generator).bfloat16()
    weight = torch.randn(256, 4, generator=generator).bfloat16()
    options = {"activation": "silu"}
    expected, expected_gradients = gradients(
        convolution.causal_conv1d, {"x": x.double(), "weight": weight.double()}, cu_seqlens=ENDS, **options
    )
    output, actual = gradients(
        causal_conv1d, {"x": x.cuda(), "weight": weight.cuda()}, cu_seqlens=ENDS.cuda(), **options
    )
    assert relative(output, expected) < 1e-2
    assert all(relative(actual[name], gradient) < 1e-2 for name, gradient in expected_gradients.items())
    assert relative(l2norm(x.cuda()), delta_rule.l2norm(x.double())) < 1e-2


def test_packed_samples_do_not_see_each_other(chunked: Any) -> None:
    first = {name: tensor.cuda() for name, tensor in inputs().items()}
    second = {name: tensor.clone() for name, tensor in first.items()}
    start, end = int(ENDS[0]), int(ENDS[1])
    second["v"][:, start:end] = 100.0
    second["k"][:, start:end] = second["k"][:, start:end].flip(1)
    (first_gradient, _), (second_gradient, _) = (
        gradients(chunked, tensors, cu_seqlens=ENDS.cuda()) for tensors in (first, second)
    )
    assert not torch.equal(first_gradient[:, start:end], second_gradient[:, start:end])
    assert torch.equal(first_gradient[:, end:], second_gradient[:, end:])
