"""flash-linear-attention's kernels as the Megatron engine calls them, against the reference functions of the CPU in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.engines.common.key_values import DecodeStep, KeyValues, Prefill
from megascend.engines.common.linear_attention import LayerState, decoding_functions
from megascend.reference.fla import convolution, delta_rule

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


ROWS, STEPS, CHANNELS, TAPS = 3, 5, 384, 4
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of relative errors: the kernels of decoding compute in fp32 and without matrix products, whatever their inputs are."""


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_recurrent_kernel_equals_the_reference(dtype: torch.dtype) -> None:
    pytest.importorskip("fla.ops.gated_delta_rule", reason="needs flash-linear-attention")
    generator = torch.Generator().manual_seed(3)
    rule = decoding_functions("cuda").delta_rule
    assert rule.__module__.startswith("fla.")
    state = normal(generator, torch.float32, ROWS, 2 * HEADS, KEY, VALUE)
    on_device, exact = state.cuda(), state.double()
    for _ in range(STEPS):
        # Two value heads for a key head.
        token = {
            "q": normal(generator, dtype, ROWS, 1, HEADS, KEY),
            "k": normal(generator, dtype, ROWS, 1, HEADS, KEY),
            "v": normal(generator, dtype, ROWS, 1, 2 * HEADS, VALUE),
            "g": -torch.rand(ROWS, 1, 2 * HEADS, generator=generator),
            "beta": normal(generator, dtype, ROWS, 1, 2 * HEADS).sigmoid(),
        }
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        output, on_device = rule(**{k: v.cuda() for k, v in token.items()}, initial_state=on_device, **options)
        expected, after = delta_rule.fused_recurrent_gated_delta_rule(
            **{name: value.double() for name, value in token.items()}, initial_state=exact, **options
        )
        assert after is not None
        exact = after
        assert output.dtype == dtype
        assert relative(output, expected) < BOUNDS[dtype]
        assert on_device.dtype == torch.float32
        assert relative(on_device, exact) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_update_of_the_convolution_equals_the_reference(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    # Of a cache with more rows, all of which but these must stay as they are.
    cache = normal(generator, dtype, ROWS + 2, CHANNELS, TAPS)
    on_device = cache.cuda()
    weight = normal(generator, dtype, CHANNELS, TAPS)
    added = normal(generator, dtype, CHANNELS) if bias else None
    exact = cache[1 : 1 + ROWS].double()
    for _ in range(STEPS):
        x = normal(generator, dtype, ROWS, CHANNELS)
        output = decoding_functions("cuda").convolve(
            x.cuda(), on_device[1 : 1 + ROWS], weight.cuda(), None if added is None else added.cuda(), "silu"
        )
        expected = decoding_functions("cpu").convolve(
            x.double(), exact, weight.double(), None if added is None else added.double(), "silu"
        )
        assert output.shape == x.shape
        assert relative(output, expected) < BOUNDS[dtype]
        # The state is inputs, which nobody rounds.
        assert torch.equal(on_device[1 : 1 + ROWS].cpu().double(), exact)
    assert torch.equal(on_device[[0, -1]].cpu(), cache[[0, -1]])


def test_decoding_continues_the_kernels_of_prompts(chunked: Any) -> None:
    from fla.modules.convolution import causal_conv1d

    generator, prompt, tokens = torch.Generator().manual_seed(5), 150, 160
    bf16 = torch.bfloat16
    x, weight = normal(generator, bf16, 1, tokens, CHANNELS), normal(generator, bf16, CHANNELS, TAPS)
    q, k = normal(generator, bf16, 2, 1, tokens, HEADS, KEY).unbind()
    v, beta = normal(generator, bf16, 1, tokens, HEADS, VALUE), normal(generator, bf16, 1, tokens, HEADS).sigmoid()
    g = -0.2 * torch.rand(1, tokens, HEADS, generator=generator)
    mixed = convolution.causal_conv1d(x.double(), weight.double(), activation="silu")[0]
    expected, _ = delta_rule.chunk_gated_delta_rule(
        *(part.double() for part in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True
    )
    x, weight, q, k, v, g, beta = (part.cuda() for part in (x, weight, q, k, v, g, beta))
    cache = KeyValues(1, tokens, torch.device("cuda"))
    filling = LayerState(Prefill(cache, (0,), (prompt,), (prompt,)), 0)
    start = slice(0, prompt)

    def convolve(x: Tensor) -> Tensor:
        return causal_conv1d(x=x, weight=weight, bias=None, activation="silu")[0]

    def compute(g: Tensor, beta: Tensor) -> Any:
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return chunked(q[:, start], k[:, start], v[:, start], g=g, beta=beta, **options)

    with torch.no_grad():
        filling.convolve(x[:, start], weight, None, "silu", convolve)
        filling.delta_rule(*(part[:, start] for part in (q, k, v, g, beta)), compute=compute, normalise=True)
        for position in range(prompt, tokens):
            growing, token = LayerState(DecodeStep(cache, slice(0, 1)), 0), slice(position, position + 1)
            output = growing.convolve(x[:, token], weight, None, "silu", convolve)
            assert relative(output, mixed[:, token]) < 1e-2
            output = growing.delta_rule(
                *(part[:, token] for part in (q, k, v, g, beta)), compute=compute, normalise=True
            )
            assert relative(output, expected[:, token]) < 2e-2
            cache.advance()
