"""The other fused operators against their formulas, their gradients against autograd, their checks, and the call log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from simnpu import call_log
from simnpu.errors import NotSimulatedError
from simnpu.operators import matmul, rope
from simnpu.operators.optimizer import npu_apply_fused_adamw_v2

pytestmark = pytest.mark.usefixtures("sim_npu")


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agree(operator: Callable[..., Any], formula: Callable[..., Any], *tensors: Tensor) -> None:
    """Same first result and same gradients of all tensors, on the device and (in float64) on the CPU."""
    found_leaves = [t.npu().requires_grad_() for t in tensors]
    leaves = [t.double().requires_grad_() for t in tensors]
    actual, expected = operator(*found_leaves), formula(*leaves)
    actual = actual if isinstance(actual, Tensor) else actual[0]
    assert actual.device.type == "npu"
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach(), atol=2e-6, rtol=2e-6)
    weight = make(*expected.shape, seed=99)
    (actual * weight.npu()).sum().backward()
    (expected * weight).sum().backward()
    for leaf, other in zip(found_leaves, leaves, strict=True):
        torch.testing.assert_close(leaf.grad.cpu().double(), other.grad, atol=5e-6, rtol=5e-6)


def test_rms_norm(npu: Any) -> None:
    def formula(x: Tensor, gamma: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma

    x, gamma = make(3, 2, 16), make(16, seed=1)
    agree(lambda x, gamma: npu.npu_rms_norm(x, gamma, epsilon=1e-5), formula, x, gamma)
    _, rstd = npu.npu_rms_norm(x.npu(), gamma.npu(), epsilon=1e-5)
    assert rstd.shape == (3, 2, 1)
    torch.testing.assert_close(rstd.cpu(), (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
    with pytest.raises(RuntimeError, match=r"gamma shape \[8\] must equal the last dimensions of x \[3, 2, 16\]"):
        npu.npu_rms_norm(x.npu(), gamma[:8].npu())


def test_rms_norm_in_bfloat16_takes_the_root_in_float32(npu: Any) -> None:
    x, gamma = make(4, 64).bfloat16(), make(64, seed=1).bfloat16()
    result = npu.npu_rms_norm(x.npu(), gamma.npu())[0]
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma.double()
    torch.testing.assert_close(result.cpu(), wide.bfloat16())


def test_add_rms_norm(npu: Any) -> None:
    x1, x2, gamma = make(3, 8), make(3, 8, seed=1), make(8, seed=2)
    y, rstd, total = npu.npu_add_rms_norm(x1.npu(), x2.npu(), gamma.npu())
    torch.testing.assert_close(total.cpu(), x1 + x2)
    torch.testing.assert_close(y.cpu(), (x1 + x2) * rstd.cpu() * gamma)
    with pytest.raises(RuntimeError, match="x1 and x2 must have one shape and type"):
        npu.npu_add_rms_norm(x1.npu(), x2[:2].npu(), gamma.npu())


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_swiglu(npu: Any, dim: int) -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim)
        return gate * torch.sigmoid(gate) * up

    agree(lambda x: npu.npu_swiglu(x, dim=dim), formula, make(4, 6, 8))
    with pytest.raises(RuntimeError, match="the size of dim -1 must be even, but got 7"):
        npu.npu_swiglu(make(2, 7).npu())
    with pytest.raises(RuntimeError, match=r"Expected npu_swiglu dim value 5 to be in range \[-2, 1\]"):
        npu.npu_swiglu(make(2, 8).npu(), dim=5)


def test_gelus(npu: Any) -> None:
    def geglu(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return left * functional.gelu(right, approximate="tanh")

    x = make(4, 8)
    agree(npu.npu_geglu, geglu, x)
    agree(lambda x: npu.npu_gelu(x, approximate="tanh"), lambda x: functional.gelu(x, approximate="tanh"), x)
    agree(npu.fast_gelu, lambda x: x * torch.sigmoid(1.702 * x), x)
    agree(npu.npu_fast_gelu, lambda x: x * torch.sigmoid(1.702 * x), x)
    agree(npu.npu_silu, functional.silu, x)


def test_scaled_masked_softmax(npu: Any) -> None:
    x, mask = make(2, 3, 32, 64), make(2, 1, 32, 64, seed=1) > 0

    def formula(x: Tensor) -> Tensor:
        return (0.5 * x).masked_fill(mask, -10000.0).softmax(-1)

    agree(lambda x: npu.npu_scaled_masked_softmax(x, mask.npu(), 0.5, False), formula, x)
    square = make(1, 2, 32, 32)
    agree(
        lambda x: npu.npu_scaled_masked_softmax(x, torch.zeros(1, 1, 32, 32, dtype=torch.bool).npu(), 1.0, True),
        lambda x: x.masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), float("-inf")).softmax(-1),
        square,
    )
    with pytest.raises(RuntimeError, match=r"must be multiples of 32 in \[32, 4096\]"):
        npu.npu_scaled_masked_softmax(make(1, 1, 8, 8).npu(), torch.zeros(1, 1, 8, 8, dtype=torch.bool).npu())
    with pytest.raises(RuntimeError, match=r"mask must be bool, but got torch\.float32"):
        npu.npu_scaled_masked_softmax(square.npu(), torch.zeros(1, 1, 32, 32).npu())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(npu: Any, interleaved: bool) -> None:
    """Each pair (a, b) turned by its angle: (a cos - b sin, b cos + a sin)."""
    x, angles = make(5, 2, 3, 8), make(5, 1, 1, 4, seed=1)
    angle = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)

    def formula(x: Tensor) -> Tensor:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        cos, sin = angles.double().cos(), angles.double().sin()
        pairs = (a * cos - b * sin, b * cos + a * sin)
        return torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)

    cos, sin = angle.double().cos().float().npu(), angle.double().sin().float().npu()
    mode = "interleave" if interleaved else "half"
    agree(lambda x: npu.npu_rotary_mul(x, cos, sin, mode), formula, x)
    agree(lambda x: rope.npu_rotary_position_embedding(x, cos, sin, int(interleaved)), formula, x)
    with pytest.raises(RuntimeError, match="cannot be broadcast to x"):
        npu.npu_rotary_mul(x[:4].npu(), cos, sin)
    with pytest.raises(
        RuntimeError, match="The rotary_mode of npu_rotary_mul should be half or interleave, but got quarter"
    ):
        npu.npu_rotary_mul(x.npu(), cos, sin, "quarter")


GROUPS = [3, 0, 4]


@pytest.mark.parametrize("kind", ["cumulative", "counts", "list"])
def test_grouped_matmul(npu: Any, kind: str) -> None:
    x, weight, bias = make(7, 5), make(3, 5, 6, seed=1), make(3, 6, seed=2)
    ends = torch.tensor(GROUPS).cumsum(0)
    group_list = {"cumulative": ends.npu(), "counts": torch.tensor(GROUPS).npu(), "list": ends.tolist()}[kind]
    options = {"group_list": group_list, "group_type": 0, "group_list_type": int(kind == "counts")}
    expected = [part @ w for part, w in zip(x.split(GROUPS), weight, strict=True)]
    separate = [w.npu() for w in weight]
    joined = npu.npu_grouped_matmul([x.npu()], separate if kind == "list" else [weight.npu()], split_item=3, **options)
    assert len(joined) == 1
    torch.testing.assert_close(joined[0].cpu(), torch.cat(expected))

    grad = make(7, 6, seed=3)
    if kind == "list":  # a list groups rows alone, and has separate results
        results = npu.npu_grouped_matmul([x.npu()], separate, bias=[b.npu() for b in bias], **options)
        for actual, part, row in zip(results, expected, bias, strict=True):
            torch.testing.assert_close(actual.cpu(), part + row)
        options["group_list"] = ends.npu()
    d_weight = npu.npu_grouped_matmul([x.npu().t()], [grad.npu()], split_item=3, **options | {"group_type": 2})[0]
    parts = [left.t() @ right for left, right in zip(x.split(GROUPS), grad.split(GROUPS), strict=True)]
    torch.testing.assert_close(d_weight.cpu(), torch.stack(parts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_type": None}, "Requires manual passing group_type, current is None"),
        ({"group_type": 1}, r"The group type must be -1, 0 or 2, but now is \[1\]"),
        ({"split_item": 4}, r"Invalid value of split_item \[4\]"),
        ({"group_list": torch.tensor([3, 2, 7])},
         r"group_list\[1\] - group_list\[0\] should be larger than or equal to 0, but now is -1"),
        ({"group_list": torch.tensor([3, 3, 6])}, "group_list names 6 of 7 rows"),
        ({"group_list": torch.tensor([3, 3, 8])}, "group_list names 8 rows, but the tensor"),
        ({"group_list": torch.tensor([3, 3, 7], dtype=torch.int32)}, r"group_list must be int64"),
        ({"x": []}, "Invalid inputs: neither x nor weight could be empty"),
    ],
)  # fmt: skip
def test_what_grouped_matmul_refuses(npu: Any, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": [make(7, 5).npu()], "weight": [make(3, 5, 6).npu()], "group_list": torch.tensor([3, 3, 7]),
        "group_type": 0, "split_item": 3,
    } | changes  # fmt: skip
    arguments["group_list"] = arguments["group_list"].npu()
    with pytest.raises(RuntimeError, match=message):
        npu.npu_grouped_matmul(arguments.pop("x"), arguments.pop("weight"), **arguments)


def test_weight_gradients_added_to_main_gradients(npu: Any) -> None:
    x, grad, total = make(7, 5), make(7, 6, seed=1), make(5, 6, seed=2)
    accumulated = total.npu()
    assert matmul.npu_matmul_add_fp32(x.bfloat16().npu(), grad.bfloat16().npu(), accumulated) is None
    expected = total + x.bfloat16().float().t() @ grad.bfloat16().float()
    torch.testing.assert_close(accumulated.cpu(), expected)

    totals = make(3, 5, 6, seed=3)
    accumulated = totals.npu()
    matmul.npu_groupmatmul_add_fp32(x.npu(), grad.npu(), torch.tensor(GROUPS).cumsum(0).npu(), accumulated)
    parts = [left.t() @ right for left, right in zip(x.split(GROUPS), grad.split(GROUPS), strict=True)]
    torch.testing.assert_close(accumulated.cpu(), totals + torch.stack(parts))


def test_bmm_and_linear(npu: Any) -> None:
    agree(lambda a, b: npu.npu_bmmV2(a, b, []), torch.bmm, make(2, 3, 4), make(2, 4, 5, seed=1))
    agree(npu.npu_linear, functional.linear, make(3, 4), make(5, 4, seed=1), make(5, seed=2))


def test_permute_and_unpermute_by_indices(npu: Any) -> None:
    tokens, probs = make(5, 4), make(5, 2, seed=1).softmax(-1)
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)

    permuted, places = npu.npu_moe_token_permute(tokens.npu(), experts.npu())
    rows = [(token, k) for expert in range(3) for token in range(5) for k in range(2) if experts[token, k] == expert]
    torch.testing.assert_close(permuted.cpu(), torch.stack([tokens[token] for token, _ in rows]))
    assert places.dtype == torch.int32
    assert places.tolist() == [rows.index((token, k)) for token in range(5) for k in range(2)]

    def there_and_back(tokens: Tensor, probs: Tensor) -> Tensor:
        permuted, places = npu.npu_moe_token_permute(tokens, experts.npu())
        return npu.npu_moe_token_unpermute(permuted * 2, places, probs=probs)

    agree(there_and_back, lambda tokens, probs: 2 * tokens * probs.sum(-1, keepdim=True), tokens, probs)


ROUTING = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)


def test_permute_and_unpermute_by_routing_map(npu: Any) -> None:
    tokens, probs = make(4, 6), make(4, 3, seed=1)
    routing_map = ROUTING.npu()
    order = [token for expert in range(3) for token in range(4) if ROUTING[token, expert]]
    permuted, permuted_probs, places = npu.npu_moe_token_permute_with_routing_map(
        tokens.npu(), routing_map, probs=probs.npu(), num_out_tokens=8
    )
    torch.testing.assert_close(permuted.cpu(), tokens[order])
    torch.testing.assert_close(permuted_probs.cpu(), probs.t()[ROUTING.t()])
    torch.testing.assert_close(permuted.cpu()[places.cpu().long()], tokens.repeat_interleave(2, 0))

    def there_and_back(tokens: Tensor, probs: Tensor) -> Tensor:
        permuted, weights, places = npu.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=8
        )
        weighted = permuted * weights.unsqueeze(-1)
        return npu.npu_moe_token_unpermute_with_routing_map(weighted, places, [4, 6], routing_map=routing_map)

    def combined(tokens: Tensor, probs: Tensor) -> Tensor:
        permuted, _, places = npu.npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=8)
        return npu.npu_moe_token_unpermute_with_routing_map(
            permuted, places, [4, 6], probs=probs, routing_map=routing_map
        )

    def formula(tokens: Tensor, probs: Tensor) -> Tensor:
        return tokens * (probs * ROUTING).sum(-1, keepdim=True)

    agree(there_and_back, formula, tokens, probs)
    agree(combined, formula, tokens, probs)
    with pytest.raises(RuntimeError, match="every token must have the same number of experts"):
        npu.npu_moe_token_permute_with_routing_map(tokens.npu(), routing_map, num_out_tokens=4)


@pytest.mark.parametrize("drop_and_pad", [False, True])
@pytest.mark.parametrize("with_probs", [False, True])
def test_gradient_operators_of_the_routing_map(npu: Any, drop_and_pad: bool, with_probs: bool) -> None:
    """Compare what MindSpeed's autograd functions call with the gradients of the forward operators."""
    tokens, routing_map, rows = make(4, 6), ROUTING.npu(), 6 if drop_and_pad else 8
    probs = make(4, 3, seed=1).npu().requires_grad_() if with_probs else None
    leaf = tokens.npu().requires_grad_()
    permuted, weights, places = npu.npu_moe_token_permute_with_routing_map(
        leaf, routing_map, probs=probs, num_out_tokens=rows, drop_and_pad=drop_and_pad
    )
    d_permuted, d_weights = make(rows, 6, seed=5).npu(), make(rows, seed=6).npu() if with_probs else None
    result, found_probs = npu.npu_moe_token_permute_with_routing_map_grad(
        d_permuted, d_weights, places, routing_map, 3, 4, drop_and_pad
    )
    outputs, seeds = ([permuted, weights], [d_permuted, d_weights]) if with_probs else ([permuted], [d_permuted])
    torch.autograd.backward(outputs, seeds)
    torch.testing.assert_close(result, leaf.grad)
    if probs is not None:
        torch.testing.assert_close(found_probs, probs.grad)
        probs.grad = None

    copies = make(rows, 6, seed=7).npu().requires_grad_()
    restored, out_index, token_id, _ = npu._npu_moe_token_unpermute_with_routing_map(
        copies, places, [4, 6], probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )
    d_restored = make(4, 6, seed=8).npu()
    result, found_probs = npu.npu_moe_token_unpermute_with_routing_map_grad(
        d_restored, out_index, token_id, routing_map, copies.detach(), probs, drop_and_pad, [4, 6]
    )
    restored.backward(d_restored)
    torch.testing.assert_close(result, copies.grad)
    if probs is not None:
        torch.testing.assert_close(found_probs, probs.grad)


def test_adamw_steps_equal_torchs(npu: Any) -> None:
    start = make(6, 5)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    first, second = (
        [start.clone().npu(), torch.zeros(6, 5).npu(), torch.zeros(6, 5).npu()] for _ in range(2)
    )  # var, m, v
    for step in (1, 2, 3):
        grad = make(6, 5, seed=step)
        parameter.grad = grad.clone()
        optimizer.step()
        npu.npu_apply_adam_w(
            0.8**step, 0.9**step, 0.1, 0.3, 0.8, 0.9, 1e-6, grad.npu(), None, False, False, out=tuple(first)
        )
        npu_apply_fused_adamw_v2(
            second[0], grad.npu(), second[1], second[2], None, torch.tensor(step).npu(), 0.1, 0.8, 0.9, 0.3, 1e-6,
            False, False,
        )  # fmt: skip
        torch.testing.assert_close(first[0].cpu(), parameter.detach())
        torch.testing.assert_close(second[0].cpu(), parameter.detach())


def test_ring_update_is_attention_over_both_parts(npu: Any) -> None:
    query, key, value = make(4, 2, 16), make(8, 2, 16, seed=1), make(8, 2, 16, seed=2)

    def attend(part: slice) -> Any:
        keys, values = key[part].contiguous().npu(), value[part].contiguous().npu()
        return npu.npu_fusion_attention(query.npu(), keys, values, 2, "SBH", scale=1 / math.sqrt(8))

    parts = [attend(slice(0, 5)), attend(slice(5, 8))]
    full = attend(slice(0, 8))
    merged = npu.npu_ring_attention_update(*parts[0][:3], *parts[1][:3])
    for actual, expected in zip(merged, full[:3], strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_operator_that_is_not_simulated_is_named(npu: Any) -> None:
    with pytest.raises(
        NotSimulatedError, match=r"torch_npu\.npu_weight_quant_batchmatmul: this operator is not simulated"
    ):
        npu.npu_weight_quant_batchmatmul(1, 2)
    assert not hasattr(npu, "npu_weight_quant_batchmatmul")
    with pytest.raises(NotSimulatedError, match="npu_grouped_matmul with scale is not simulated"):
        npu.npu_grouped_matmul([make(2, 2).npu()], [make(2, 2).npu()], scale=[make(2).npu()], group_type=-1)


def test_the_log_names_arguments_and_shapes(npu: Any) -> None:
    query = make(4, 2, 16).npu()
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    with call_log.recording() as calls:
        npu.npu_fusion_attention(query, query, query, 2, "SBH", atten_mask=mask, sparse_mode=2, keep_prob=0.9)
        npu.npu_swiglu(query)
    npu.npu_swiglu(query)
    assert [call.name for call in calls] == ["npu_fusion_attention", "npu_swiglu"]
    arguments = calls[0].arguments
    assert (arguments["input_layout"], arguments["sparse_mode"], arguments["keep_prob"]) == ("SBH", 2, 0.9)
    assert arguments["atten_mask"] == call_log.TensorArgument((2048, 2048), "bool", "npu:0")
    assert arguments["query"].shape == (4, 2, 16)


def test_the_log_of_a_process_is_a_file_and_ends_with_the_refused_call(
    npu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMNPU_LOG", str(tmp_path))
    query = make(4, 2, 16).npu()
    npu.npu_swiglu(query)
    with pytest.raises(RuntimeError, match="keep_prob"):
        npu.npu_fusion_attention(query, query, query, 2, "SBH", keep_prob=2.0)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["npu_swiglu", "npu_fusion_attention"]
    assert lines[1]["arguments"]["query"] == {"shape": [4, 2, 16], "dtype": "float32", "device": "npu:0"}
