"""The gated delta rule against the recurrence that defines it, written out in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.fla.delta_rule import (
    chunk_gated_delta_rule,
    exact_in_fp32,
    fused_recurrent_gated_delta_rule,
    l2norm,
)

Inputs = dict[str, Tensor]
FUNCTIONS = pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])


def inputs(
    tokens: int, *, batch: int = 1, key_heads: int = 2, value_heads: int = 2, dtype: torch.dtype = torch.float64
) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q": normal(key_heads, 8),
        "k": l2norm(normal(key_heads, 8)),
        "v": normal(value_heads, 6),
        "g": -torch.nn.functional.softplus(normal(value_heads)) * 3,
        "beta": normal(value_heads).sigmoid(),
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs and the last states by matrices, head by head: S <- exp(g) (1 - beta k k^T) S + beta k v^T."""
    batch, tokens, heads, width = v.shape
    share = heads // k.shape[2]
    rows, states = [], []
    for row in range(batch):
        for head in range(heads):
            matrix = torch.zeros(k.shape[3], width, dtype=torch.float64) if state is None else state[row, head].double()
            outputs = []
            for token in range(tokens):
                key, strength = k[row, token, head // share].double(), beta[row, token, head].double()
                keep = torch.eye(len(key), dtype=torch.float64) - strength * torch.outer(key, key)
                matrix = g[row, token, head].double().exp() * (keep @ matrix)
                matrix = matrix + strength * torch.outer(key, v[row, token, head].double())
                outputs.append(q[row, token, head // share].double() @ matrix / k.shape[3] ** 0.5)
            rows.append(torch.stack(outputs))
            states.append(matrix)
    stacked = torch.stack(rows).view(batch, heads, tokens, width).transpose(1, 2)
    return stacked, torch.stack(states).view(batch, heads, k.shape[3], width)


@FUNCTIONS
@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 150])
def test_outputs_states_and_gradients_equal_the_recurrence(function, tokens: int) -> None:
    tensors, plain = inputs(tokens, batch=2, value_heads=4), inputs(tokens, batch=2, value_heads=4)
    output, state = function(**tensors, output_final_state=True)
    expected, expected_state = recurrence(**plain)
    assert output.is_contiguous()  # as the kernels': models view it
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-12)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, tensor in tensors.items():
        torch.testing.assert_close(
            tensor.grad, plain[name].grad, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@FUNCTIONS
def test_fp32_stays_close_to_the_recurrence_in_fp64(function) -> None:
    tensors = inputs(300, dtype=torch.float32)
    output, _ = function(**tensors)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), recurrence(**tensors)[0], rtol=0, atol=2e-6)


@FUNCTIONS
def test_bf16_inputs_are_computed_in_fp32(function) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in inputs(100).items()}
    output, state = function(**tensors, output_final_state=True)
    expected, expected_state = recurrence(**tensors)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(state.double(), expected_state, rtol=0, atol=2e-6)
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-5)


@FUNCTIONS
def test_state_continues_a_sequence(function) -> None:
    tensors = inputs(90)
    expected, last = function(**tensors, output_final_state=True)
    first, state = function(**{name: x[:, :70] for name, x in tensors.items()}, output_final_state=True)
    second, end = function(
        **{name: x[:, 70:] for name, x in tensors.items()}, initial_state=state, output_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], dim=1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-12)


@FUNCTIONS
def test_packed_sequences_equal_separate_ones_to_the_bit(function) -> None:
    lengths = [5, 1, 130, 64]
    tensors = inputs(sum(lengths), dtype=torch.float32)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed, states = function(**tensors, cu_seqlens=ends, output_final_state=True)
    for number, (start, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        single, state = function(**{name: x[:, start:end] for name, x in tensors.items()}, output_final_state=True)
        assert torch.equal(packed[:, start:end], single)
        assert torch.equal(states[number], state[0])


def test_infinite_neighbour_changes_nothing() -> None:
    tensors = {name: x.detach().clone() for name, x in inputs(12).items()}
    expected, _ = chunk_gated_delta_rule(**tensors, cu_seqlens=torch.tensor([0, 7, 12]))
    tensors["v"][:, :7] = torch.inf
    output, _ = chunk_gated_delta_rule(**tensors, cu_seqlens=torch.tensor([0, 7, 12]))
    assert torch.equal(output[:, 7:], expected[:, 7:])


def test_strong_decay_gives_finite_gradients() -> None:
    tensors = inputs(64, dtype=torch.float32)
    with torch.no_grad():
        tensors["g"].fill_(-200.0)
    output, _ = chunk_gated_delta_rule(**tensors)
    output.sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in tensors.values())


def test_norm_in_kernel_equals_normalised_inputs() -> None:
    tensors = inputs(20)
    expected, _ = chunk_gated_delta_rule(**tensors | {name: l2norm(tensors[name]) for name in ("q", "k")})
    output, _ = chunk_gated_delta_rule(**tensors, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(l2norm(x, eps=11.0), x / 6)


def test_boundaries_that_miss_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="cu_seqlens from 0 to 4 do not describe 1 x 6 tokens"):
        chunk_gated_delta_rule(**inputs(6), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ConfigError, match="2 x 6 tokens"):
        chunk_gated_delta_rule(**inputs(6, batch=2), cu_seqlens=torch.tensor([0, 6]))


def test_fp32_is_never_left_to_a_kernel() -> None:
    def kernel(*args: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        return torch.zeros(()), None

    function = exact_in_fp32(kernel)
    rounded = {name: tensor.bfloat16() for name, tensor in inputs(9).items()}
    assert function(**rounded) == (torch.zeros(()), None)
    exact = inputs(9, dtype=torch.float32)
    assert torch.equal(function(**exact)[0], chunk_gated_delta_rule(**exact)[0])
