"""Mamba-2's state spaces against the recurrence that defines them, written out in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.fla.state_space import (
    CHUNK,
    GatedRMSNorm,
    exact_in_fp32,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

HEADS, WIDTH, GROUPS, STATE, TAPS = 4, 6, 2, 5, 4
INNER, CHANNELS = HEADS * WIDTH, HEADS * WIDTH + 2 * GROUPS * STATE
LENGTHS = (5, 1, CHUNK + 33, CHUNK)
Inputs = dict[str, Any]


def inputs(tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {
        "x": normal(batch, tokens, HEADS, WIDTH),
        "dt": normal(batch, tokens, HEADS),
        "A": -normal(HEADS).exp(),
        "B": normal(batch, tokens, GROUPS, STATE),
        "C": normal(batch, tokens, GROUPS, STATE),
        "D": normal(HEADS),
        "z": normal(batch, tokens, HEADS, WIDTH),
        "dt_bias": normal(HEADS) - 2,
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def layer_inputs(tokens: int, *, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "zxbcdt": (1, tokens, INNER + CHANNELS + HEADS),
        "conv1d_weight": (CHANNELS, TAPS),
        "conv1d_bias": (CHANNELS,),
        "dt_bias": (HEADS,),
        "A": (HEADS,),
        "D": (HEADS,),
    }
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["A"] = -tensors["A"].exp()
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    state: Tensor | None = None,
    limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Return outputs and the last states, token by token and head by head."""
    rows, states = [], []
    for row in range(len(x)):
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            matrix = torch.zeros(WIDTH, STATE, dtype=torch.float64) if state is None else state[row, head].double()
            outputs = []
            for token in range(x.shape[1]):
                step = torch.log1p((dt[row, token, head].double() + dt_bias[head].double()).exp()).clamp(*limit)
                value = x[row, token, head].double()
                matrix = (step * A[head].double()).exp() * matrix
                matrix = matrix + torch.outer(step * value, B[row, token, group].double())
                gate = z[row, token, head].double()
                output = matrix @ C[row, token, group].double() + D[head].double() * value
                outputs.append(output * gate * gate.sigmoid())
            rows.append(torch.stack(outputs))
            states.append(matrix)
    stacked = torch.stack(rows).view(len(x), HEADS, -1, WIDTH).transpose(1, 2)
    return stacked, torch.stack(states).view(len(x), HEADS, WIDTH, STATE)


def layer(tensors: Inputs) -> Tensor:
    """Return the outputs of a layer by torch's convolution and the recurrence."""
    z, channels, dt = tensors["zxbcdt"].split([INNER, CHANNELS, HEADS], dim=-1)
    rows = torch.nn.functional.pad(channels.transpose(1, 2), (TAPS - 1, 0))
    convolved = torch.nn.functional.conv1d(
        rows, tensors["conv1d_weight"].unsqueeze(1), tensors["conv1d_bias"], groups=CHANNELS
    )
    convolved = (convolved * convolved.sigmoid()).transpose(1, 2)
    x, b, c = convolved.split([INNER, GROUPS * STATE, GROUPS * STATE], dim=-1)
    output, _ = recurrence(
        x.unflatten(-1, (HEADS, WIDTH)),
        dt,
        tensors["A"],
        b.unflatten(-1, (GROUPS, STATE)),
        c.unflatten(-1, (GROUPS, STATE)),
        tensors["D"],
        z.unflatten(-1, (HEADS, WIDTH)),
        tensors["dt_bias"],
    )
    return output.flatten(-2)


def numbers(*rows: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]).int()


@pytest.mark.parametrize("tokens", [1, 3, CHUNK, CHUNK + 1, 2 * CHUNK + 22])
def test_outputs_states_and_gradients_equal_the_recurrence(tokens: int) -> None:
    tensors, plain = inputs(tokens, batch=2), inputs(tokens, batch=2)
    output, state = mamba_chunk_scan_combined(**tensors, chunk_size=128, dt_softplus=True, return_final_states=True)
    expected, expected_state = recurrence(**plain)
    assert output.is_contiguous()  # as the kernels': models view it
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-12)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, tensor in tensors.items():
        torch.testing.assert_close(
            tensor.grad, plain[name].grad, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_fp32_stays_close_to_the_recurrence_in_fp64() -> None:
    tensors = inputs(300, dtype=torch.float32)
    output = mamba_chunk_scan_combined(**tensors, chunk_size=128, dt_softplus=True)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), recurrence(**tensors)[0], rtol=1e-6, atol=1e-5)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    tensors = {name: tensor.detach().bfloat16() for name, tensor in inputs(100).items()}
    output, state = mamba_chunk_scan_combined(**tensors, chunk_size=128, dt_softplus=True, return_final_states=True)
    expected, expected_state = recurrence(**tensors)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-5)


def test_state_continues_a_sequence() -> None:
    tensors = inputs(90)
    constant = ("A", "D", "dt_bias")
    options = {"chunk_size": 128, "dt_softplus": True, "return_final_states": True}
    expected, last = mamba_chunk_scan_combined(**tensors, **options)
    head = {name: x if name in constant else x[:, :70] for name, x in tensors.items()}
    tail = {name: x if name in constant else x[:, 70:] for name, x in tensors.items()}
    first, state = mamba_chunk_scan_combined(**head, **options)
    second, end = mamba_chunk_scan_combined(**tail, **options, initial_states=state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-12)


def test_steps_are_limited_after_softplus() -> None:
    tensors, limit = inputs(12), (0.1, 0.3)
    output = mamba_chunk_scan_combined(**tensors, chunk_size=128, dt_softplus=True, dt_limit=limit)
    torch.testing.assert_close(output, recurrence(**tensors, limit=limit)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(output, recurrence(**tensors)[0])


def test_packed_sequences_equal_separate_ones_to_the_bit() -> None:
    tensors = layer_inputs(sum(LENGTHS), dtype=torch.float32)
    options = {"chunk_size": 128, "headdim": WIDTH, "ngroups": GROUPS}
    packed = mamba_split_conv1d_scan_combined(**tensors, **options, seq_idx=numbers(LENGTHS))
    borders = [0, *itertools.accumulate(LENGTHS)]
    for start, end in itertools.pairwise(borders):
        single = mamba_split_conv1d_scan_combined(**tensors | {"zxbcdt": tensors["zxbcdt"][:, start:end]}, **options)
        assert torch.equal(packed[:, start:end], single)


def test_infinite_neighbour_changes_nothing() -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in layer_inputs(12).items()}
    options = {"chunk_size": 128, "headdim": WIDTH, "ngroups": GROUPS, "seq_idx": numbers((7, 5))}
    expected = mamba_split_conv1d_scan_combined(**tensors, **options)
    tensors["zxbcdt"][:, :7] = torch.inf
    output = mamba_split_conv1d_scan_combined(**tensors, **options)
    assert torch.equal(output[:, 7:], expected[:, 7:])


def test_strong_decay_gives_finite_gradients() -> None:
    tensors = inputs(CHUNK, dtype=torch.float32)
    with torch.no_grad():
        tensors["A"].fill_(-500.0)
    mamba_chunk_scan_combined(**tensors, chunk_size=128, dt_softplus=True).sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in tensors.values())


def test_layer_equals_torch_convolution_and_the_recurrence() -> None:
    tensors, plain = layer_inputs(21), layer_inputs(21)
    output = mamba_split_conv1d_scan_combined(**tensors, chunk_size=128, headdim=WIDTH, ngroups=GROUPS)
    expected = layer(plain)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    output.square().sum().backward()
    expected.square().sum().backward()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, plain[name].grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_norm_and_projection_of_a_layer(norm_before_gate: bool) -> None:
    tensors, generator = layer_inputs(8), torch.Generator().manual_seed(2)
    weight = torch.randn(INNER, generator=generator, dtype=torch.float64)
    projection = torch.randn(3, INNER, generator=generator, dtype=torch.float64)
    z = tensors["zxbcdt"][..., :INNER]
    gate = z * z.sigmoid()
    values = layer(tensors) / gate  # without the gate
    values = values if norm_before_gate else values * gate
    groups = values.view(1, 8, GROUPS, -1)
    expected = (groups / (groups.square().mean(-1, keepdim=True) + 1e-3).sqrt()).view(1, 8, INNER) * weight
    expected = expected * gate if norm_before_gate else expected
    output = mamba_split_conv1d_scan_combined(
        **tensors,
        chunk_size=128,
        headdim=WIDTH,
        ngroups=GROUPS,
        rmsnorm_weight=weight,
        rmsnorm_eps=1e-3,
        outproj_weight=projection,
        norm_before_gate=norm_before_gate,
    )
    torch.testing.assert_close(output, expected @ projection.T, rtol=1e-9, atol=1e-9)


def test_gated_norm_module_normalises_groups() -> None:
    norm = GatedRMSNorm(6, eps=0.5, group_size=3, norm_before_gate=False, dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=torch.float64)
    groups = x.view(2, 3)
    expected = (groups / (groups.square().mean(-1, keepdim=True) + 0.5).sqrt()).view(1, 6)
    torch.testing.assert_close(norm(x), expected)
    z = torch.ones_like(x)
    gated = x * torch.sigmoid(z)
    expected = (gated.view(2, 3) / (gated.view(2, 3).square().mean(-1, keepdim=True) + 0.5).sqrt()).view(1, 6)
    torch.testing.assert_close(norm(x, z), expected)


def test_fp32_is_never_left_to_a_kernel() -> None:
    def kernel(*args: Tensor, **kwargs: object) -> dict[str, object]:
        return kwargs

    function, options = exact_in_fp32(kernel), {"chunk_size": 128, "headdim": WIDTH, "ngroups": GROUPS}
    rounded = {name: tensor.bfloat16() for name, tensor in layer_inputs(9).items()}
    passed_on = function(rounded.pop("zxbcdt"), **rounded, **options, state_dtype=torch.bfloat16)
    assert passed_on == {**rounded, **options, "state_dtype": torch.bfloat16}
    exact = layer_inputs(9, dtype=torch.float32)
    expected = mamba_split_conv1d_scan_combined(**exact, **options)
    assert torch.equal(function(**exact, **options, state_dtype=torch.float32), expected)


def test_what_the_reference_lacks_is_refused() -> None:
    tensors = inputs(4)
    with pytest.raises(ConfigError, match="neither cu_seqlens"):
        mamba_chunk_scan_combined(**tensors, chunk_size=128, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ConfigError, match="no states of packed sequences"):
        mamba_chunk_scan_combined(**tensors, chunk_size=128, seq_idx=numbers((4,)), return_final_states=True)
    with pytest.raises(ConfigError, match="headdim is missing"):
        mamba_split_conv1d_scan_combined(**layer_inputs(4), chunk_size=128)
    with pytest.raises(ConfigError, match=f"not {INNER + CHANNELS + HEADS} for 4 heads of 6"):
        mamba_split_conv1d_scan_combined(
            **layer_inputs(4) | {"zxbcdt": torch.zeros(1, 4, 3)}, chunk_size=128, headdim=WIDTH
        )
