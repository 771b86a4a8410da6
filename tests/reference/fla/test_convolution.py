"""Causal convolutions against torch's own, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.fla.convolution import causal_conv1d, causal_conv1d_fn, causal_conv1d_update

LENGTHS = [2, 9, 1, 4]
CHANNELS, TAPS = 6, 4


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, sum(LENGTHS), CHANNELS), (CHANNELS, TAPS), (CHANNELS,))
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, bias


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve [1, tokens, channels] by torch, and apply SiLU."""
    rows = torch.nn.functional.pad(x.transpose(1, 2), (TAPS - 1, 0))
    outputs = torch.nn.functional.conv1d(rows, weight.unsqueeze(1), bias, groups=CHANNELS).transpose(1, 2)
    return outputs * outputs.sigmoid()


def by_sequence(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.cat([plain(part, weight, bias) for part in x.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_sequences_equal_torch_sequence_by_sequence(tensors: tuple[Tensor, ...], with_bias: bool) -> None:
    x, weight, bias = tensors[0], tensors[1], tensors[2] if with_bias else None
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).unsqueeze(0)
    expected = by_sequence(x, weight, bias)
    output, state = causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=starts)
    assert state is None
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)
    transposed = causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx=numbers, activation="swish")
    torch.testing.assert_close(transposed.transpose(1, 2), expected, rtol=0, atol=1e-13)


def test_gradients_equal_torch(tensors: tuple[Tensor, ...]) -> None:
    gradients, starts = [], torch.tensor([0, *LENGTHS]).cumsum(0)
    for function in (by_sequence, lambda *args: causal_conv1d(*args, activation="silu", cu_seqlens=starts)[0]):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        function(*leaves).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_one_sequence_without_boundaries(tensors: tuple[Tensor, ...]) -> None:
    x, weight, bias = tensors
    torch.testing.assert_close(causal_conv1d(x, weight, bias, activation="silu")[0], plain(x, weight, bias))
    linear = causal_conv1d_fn(x.transpose(1, 2), weight).transpose(1, 2)
    torch.testing.assert_close(linear * linear.sigmoid(), plain(x, weight, None))


def test_infinite_neighbour_changes_nothing(tensors: tuple[Tensor, ...]) -> None:
    x, weight, bias = tensors
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    expected = causal_conv1d(x, weight, bias, cu_seqlens=starts)[0]
    x = x.clone()
    x[:, : LENGTHS[0]] = torch.inf
    assert torch.equal(causal_conv1d(x, weight, bias, cu_seqlens=starts)[0][:, LENGTHS[0] :], expected[:, LENGTHS[0] :])


def test_update_continues_a_sequence(tensors: tuple[Tensor, ...]) -> None:
    x, weight, bias = tensors
    state = torch.zeros(1, CHANNELS, TAPS - 1, dtype=torch.float64)
    rows = [
        causal_conv1d_update(part.transpose(1, 2), state, weight, bias, "silu").transpose(1, 2)
        for part in x.split([1, 1, 5, 1, 8], dim=1)
    ]
    torch.testing.assert_close(torch.cat(rows, dim=1), plain(x, weight, bias), rtol=0, atol=1e-13)
    assert torch.equal(state, x[:, -(TAPS - 1) :].transpose(1, 2))


def test_what_the_reference_lacks_is_refused(tensors: tuple[Tensor, ...]) -> None:
    x, weight, bias = tensors
    with pytest.raises(ConfigError, match="output_final_state"):
        causal_conv1d(x, weight, bias, output_final_state=True)
    with pytest.raises(ConfigError, match="'tanh' is not known"):
        causal_conv1d(x, weight, bias, activation="tanh")
