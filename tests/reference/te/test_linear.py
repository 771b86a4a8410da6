"""Linear, LayerNormLinear, GroupedLinear and the norms against torch.nn.functional."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import PlatformError
from megascend.reference.te.linear import GroupedLinear, LayerNormLinear, Linear
from megascend.reference.te.norms import LayerNorm, RMSNorm

EPS = 1e-5


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def randomised(module: torch.nn.Module) -> Any:
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(leaf(*parameter.shape, seed=100 + index))
    return module


def rms_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def assert_same_gradients(result: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Compare the gradients of both outputs, with the same leaves and weighting."""
    weighting = torch.cos(torch.arange(expected.numel(), dtype=expected.dtype)).view_as(expected)
    grads = torch.autograd.grad((result * weighting).sum(), leaves, retain_graph=True)
    expected_grads = torch.autograd.grad((expected * weighting).sum(), leaves, retain_graph=True)
    for g, w in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_matches_functional(bias: bool) -> None:
    layer = randomised(Linear(6, 4, bias=bias))
    x = leaf(3, 2, 6)
    expected = F.linear(x, layer.weight, layer.bias if bias else None)
    torch.testing.assert_close(layer(x), expected)
    assert_same_gradients(layer(x), expected, [x, *layer.parameters()])


def test_return_bias_leaves_it_out_of_the_product() -> None:
    layer = randomised(Linear(6, 4, return_bias=True))
    x = leaf(3, 6)
    out, bias = layer(x)
    torch.testing.assert_close(out, F.linear(x, layer.weight))
    torch.testing.assert_close(bias, layer.bias)


def test_weight_is_cast_to_the_dtype_of_the_input() -> None:
    layer = randomised(Linear(6, 4, params_dtype=torch.float32))
    x = leaf(3, 6).bfloat16()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(zero_centered: bool) -> None:
    layer = randomised(RMSNorm(8, eps=EPS, zero_centered_gamma=zero_centered, sequence_parallel=True))
    x = leaf(3, 8)
    expected = rms_by_hand(x, layer.weight + 1 if zero_centered else layer.weight)
    torch.testing.assert_close(layer(x), expected)
    assert_same_gradients(layer(x), expected, [x, layer.weight])
    assert layer.weight.sequence_parallel is True


@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm(zero_centered: bool) -> None:
    layer = randomised(LayerNorm(8, eps=EPS, zero_centered_gamma=zero_centered, sequence_parallel=False))
    x = leaf(3, 8)
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + EPS)
    expected = scaled * (layer.weight + 1 if zero_centered else layer.weight) + layer.bias
    torch.testing.assert_close(layer(x), expected)
    assert_same_gradients(layer(x), expected, [x, layer.weight, layer.bias])
    assert layer.bias.sequence_parallel is False


def test_norm_of_bf16_is_computed_in_fp32() -> None:
    layer = randomised(RMSNorm(512, eps=EPS, params_dtype=torch.bfloat16))
    x = leaf(2, 512).bfloat16()
    expected = rms_by_hand(x.double(), layer.weight.double()).bfloat16()
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_layer_norm_linear(normalization: str) -> None:
    layer = randomised(LayerNormLinear(8, 4, eps=EPS, normalization=normalization, return_layernorm_output=True))
    x = leaf(3, 8)
    if normalization == "RMSNorm":
        normed = rms_by_hand(x, layer.layer_norm_weight)
    else:
        normed = F.layer_norm(x, (8,), layer.layer_norm_weight, layer.layer_norm_bias, EPS)
    expected = F.linear(normed, layer.weight, layer.bias)
    out, returned = layer(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(returned, normed)
    assert_same_gradients(out, expected, [x, *layer.parameters()])
    layer.return_layernorm_output = False  # mcore-bridge's LoRA switches it on the live layer
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear(bias: bool) -> None:
    layer = randomised(GroupedLinear(3, 6, 4, bias=bias))
    x = leaf(7, 6)
    splits = [2, 0, 5]
    expected = torch.cat(
        [
            F.linear(rows, getattr(layer, f"weight{i}"), getattr(layer, f"bias{i}") if bias else None)
            for i, rows in enumerate(x.split(splits))
        ]
    )
    torch.testing.assert_close(layer(x, splits), expected)
    assert_same_gradients(layer(x, splits), expected, [x, *layer.parameters()])
    layer(x, torch.tensor(splits)).sum().backward()
    assert torch.equal(layer.weight1.grad, torch.zeros(4, 6))  # no tokens: a zero gradient, not a missing one


def test_grouped_linear_without_any_token() -> None:
    layer = randomised(GroupedLinear(2, 6, 4, bias=False))
    out = layer(torch.empty(0, 6, requires_grad=True), [0, 0])
    assert out.shape == (0, 4)
    out.sum().backward()
    assert torch.equal(layer.weight0.grad, torch.zeros(4, 6))


def test_tensor_parallel_marks() -> None:
    column = Linear(8, 8, parallel_mode="column", tp_size=2)
    row = Linear(8, 8, parallel_mode="row", tp_size=2, sequence_parallel=True)
    duplicated = Linear(8, 8, rng_tracker_name="data-parallel-rng")
    expert = Linear(8, 8, rng_tracker_name="expert-parallel-rng")
    assert (column.weight.shape, column.bias.shape) == ((4, 8), (4,))
    assert (row.weight.shape, row.bias.shape) == ((8, 4), (8,))
    marks = [(p.tensor_model_parallel, p.partition_dim) for p in (column.weight, column.bias, row.weight)]
    assert marks == [(True, 0), (True, 0), (True, 1)]
    assert not hasattr(row.bias, "tensor_model_parallel")
    assert row.bias.sequence_parallel is True
    # Transformer Engine 2.11 marks the weight of every mode (module/linear.py, reset_parameters).
    assert duplicated.weight.tensor_model_parallel is True
    assert expert.weight.tensor_model_parallel is True


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("fuse_wgrad_accumulation", True, "gradient_accumulation_fusion"),
        ("delay_wgrad_compute", True, "delay_wgrad_compute"),
        ("ub_overlap_ag", True, "tp_comm_overlap"),
        ("symmetric_ar_type", "two_shot", "symmetric_ar_type"),
    ],
)
def test_unsupported_settings_are_refused(setting: str, value: Any, named: str) -> None:
    for layer in (Linear, LayerNormLinear):
        with pytest.raises(PlatformError, match=named):
            layer(4, 4, **{setting: value})
