"""Limits that torch_npu's and CANN's documentation states: at the limit a call passes, beyond it the limit is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("sim_npu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="npu")


def test_heads_of_fused_attention(npu: Any) -> None:
    def attend(heads: int, layout: str) -> Any:
        shape = {"BNSD": (1, heads, 1, 2), "SBH": (1, 1, 2 * heads), "TND": (1, heads, 2)}[layout]
        options = {"actual_seq_qlen": [1], "actual_seq_kvlen": [1]} if layout == "TND" else {}
        q = zeros(*shape)
        return npu.npu_fusion_attention(q, q, q, heads, layout, **options)[0]

    for layout in ("BNSD", "SBH", "TND"):
        assert attend(256, layout).numel() == 512
        with pytest.raises(RuntimeError, match=r"n1Size is not in range:\[1, 256\]: it is 257"):
            attend(257, layout)


def test_lengths_of_fused_attention(npu: Any) -> None:
    q = zeros(4, 2, 2)
    for wrong, kind in ((torch.tensor([2, 4]), "Tensor"), (4, "int")):
        with pytest.raises(
            RuntimeError, match=rf"List\[int\]\]' for argument 'actual_seq_qlen' .* found type '{kind}'"
        ):
            npu.npu_fusion_attention(q, q, q, 2, "TND", actual_seq_qlen=wrong, actual_seq_kvlen=[2, 4])
    with pytest.raises(RuntimeError, match="of type 'Tensor' for argument 'query' but instead found type 'list'"):
        npu.npu_fusion_attention([1.0], q, q, 2, "TND")
    many = zeros(2049, 1, 2)
    with pytest.raises(RuntimeError, match="actual_seq_qlen must have at most 1024 entries, but got 2049"):
        npu.npu_fusion_attention(
            many, many, many, 1, "TND", actual_seq_qlen=[*range(1, 2050)], actual_seq_kvlen=[*range(1, 2050)]
        )
    long = zeros(1, 1, 1, 1).expand(1, 1, 2**20 + 1, 1)
    with pytest.raises(RuntimeError, match="sequence length must be at most 1048576, but got 1048577"):
        npu.npu_fusion_attention(zeros(1, 1, 1, 1), long, long, 1, "BNSD")


B, N, S, D = 3, 4, 5, 8
HALF = [
    ((B, N, S, D), (1, 1, S, D)), ((B, N, S, D), (B, 1, S, D)), ((B, N, S, D), (B, N, S, D)),
    ((B, S, N, D), (1, S, 1, D)), ((B, S, N, D), (B, S, 1, D)), ((S, B, N, D), (S, 1, 1, D)),
    ((S, B, N, D), (S, B, 1, D)), ((S, N, D), (S, 1, D)), ((S, N, D), (S, N, D)),
]  # fmt: skip


@pytest.mark.parametrize(("x", "cos"), HALF)
def test_layouts_of_rotary_mul(npu: Any, x: tuple[int, ...], cos: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    values, angles = torch.randn(*x, generator=generator), torch.randn(*cos, generator=generator)
    result = npu.npu_rotary_mul(values.npu(), angles.cos().npu(), angles.sin().npu())
    first, second = values.double().chunk(2, -1)
    expected = values.double() * angles.double().cos() + torch.cat((-second, first), -1) * angles.double().sin()
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "cos", "mode", "gradient", "message"),
    [
        ((1, 1, 2, 896), (1, 1, 2, 896), "half", False, "must be even and less than 896, but got 896"),
        ((1000, 1, 2, 2), (1, 1, 2, 2), "half", False, r"B and N must be less than 1000, but got B, N = \(1000, 1\)"),
        ((2, 3, 1000, 2), (1, 3, 1, 2), "half", False, "B and N must be less than 1000"),
        ((3, 2, 1000, 2), (3, 1, 1, 2), "half", False, "B and N must be less than 1000"),
        (
            (2, 500, 3, 2),
            (1, 1, 3, 2),
            "interleave",
            False,
            r"B \* N must be less than 1000, but got B, N = \(2, 500\)",
        ),
        ((5, 205, 3, 2), (1, 1, 3, 2), "half", True, r"B \* N must be at most 1024, but got B, N = \(5, 205\)"),
        ((2, 3, 4, 2), (1, 3, 4, 2), "half", False, r"fits none of the layouts of x .*BNSD: 11SD B1SD BNSD"),
        ((2, 3, 4, 2), (2, 1, 4, 2), "interleave", False, "fits none of the layouts"),
        ((2, 2), (2, 2), "half", False, "input must have 3 to 4 dimensions, but got 2"),
    ],
)
def test_limits_of_rotary_mul(
    npu: Any, x: tuple[int, ...], cos: tuple[int, ...], mode: str, gradient: bool, message: str
) -> None:
    angles = zeros(*cos).requires_grad_(gradient)
    with pytest.raises(RuntimeError, match=message):
        npu.npu_rotary_mul(zeros(*x), angles, angles.detach(), mode)


def test_rotary_mul_up_to_its_limits(npu: Any) -> None:
    npu.npu_rotary_mul(zeros(1, 1, 2, 894), zeros(1, 1, 2, 894), zeros(1, 1, 2, 894))
    npu.npu_rotary_mul(zeros(999, 1, 2, 2), zeros(1, 1, 2, 2), zeros(1, 1, 2, 2))
    npu.npu_rotary_mul(zeros(3, 333, 2, 2), zeros(1, 1, 2, 2), zeros(1, 1, 2, 2), "interleave")
    npu.npu_rotary_mul(zeros(4, 256, 2, 2), zeros(1, 1, 2, 2).requires_grad_(), zeros(1, 1, 2, 2))
    npu.npu_rotary_mul(zeros(5, 205, 2, 2), zeros(1, 1, 2, 2), zeros(1, 1, 2, 2))  # no gradients: B * N is free
    with pytest.raises(RuntimeError, match=r"input must be float16, bfloat16 or float32, but got torch\.float64"):
        npu.npu_rotary_mul(*[zeros(1, 1, 2, 2, dtype=torch.float64)] * 3)


def test_types_of_rms_norm(npu: Any) -> None:
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    for x, gamma in ((half, single), (brain, single), (half, half), (brain, brain), (single, single)):
        assert npu.npu_rms_norm(zeros(2, 4, dtype=x), zeros(4, dtype=gamma))[0].dtype == x
    for x, gamma in ((single, brain), (single, half), (half, brain)):
        with pytest.raises(
            RuntimeError, match=r"not support input dtype: .*; it takes float16/float16, float16/float32"
        ):
            npu.npu_rms_norm(zeros(2, 4, dtype=x), zeros(4, dtype=gamma))
    with pytest.raises(RuntimeError, match="input must have 2 to 8 dimensions, but got 9"):
        npu.npu_rms_norm(zeros(*[1] * 9), zeros(1))


PRODUCTS: dict[str, Callable[[Tensor], Any]] = {
    "mm": lambda a: a @ a,
    "linear": lambda a: torch.nn.functional.linear(a, a, a[0]),
    "bmm": lambda a: torch.bmm(a[None], a[None]),
    "einsum": lambda a: torch.einsum("ij,jk->ik", a, a),
    "mv": lambda a: a @ a[0],
    "addmm": lambda a: torch.addmm(a, a, a),
    "in place": lambda a: a.clone().addmm_(a, a),
    "out": lambda a: torch.mm(a, a, out=torch.empty_like(a)),
    "baddbmm": lambda a: torch.baddbmm(a[None], a[None], a[None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_types_of_plain_products(name: str) -> None:
    product = PRODUCTS[name]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
        torch.testing.assert_close(product(a.npu()).cpu(), product(a))
    for dtype, label in ((torch.float64, "DT_DOUBLE"), (torch.int64, "DT_INT64"), (torch.int32, "DT_INT32")):
        with pytest.raises(
            RuntimeError, match=rf"not implemented for {label}, .* list \[DT_FLOAT,DT_FLOAT16,DT_BFLOAT16,"
        ):
            product(torch.ones(2, 2, dtype=dtype).npu())
    assert product(torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64  # the CPU's own are as ever


def test_groups_of_grouped_matmul(npu: Any) -> None:
    x, weight = zeros(4, 2), zeros(2, 2, 3)
    ends = torch.tensor([1, 4]).npu()
    with pytest.raises(RuntimeError, match="Requires manual passing group_type, current is None"):
        npu.npu_grouped_matmul([x], [weight], group_list=ends, split_item=2)
    with pytest.raises(RuntimeError, match="with group_type -1 group_list must be None"):
        npu.npu_grouped_matmul([x], [weight[0]], group_list=ends, group_type=-1)
    with pytest.raises(RuntimeError, match="group_type must be None, but got 2, which torch_npu ignores"):
        npu.npu_grouped_matmul([x], [weight], group_list=[1, 4], split_item=2, group_type=2)
    assert npu.npu_grouped_matmul([x], list(weight), group_list=[1, 4], split_item=2)[0].shape == (4, 3)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(RuntimeError, match=r"x\[0\] must be float16, bfloat16 or float32, but got"):
            npu.npu_grouped_matmul([x.to(dtype)], [weight[0].to(dtype)], group_type=-1)
    ends = torch.ones(1025, dtype=torch.int64).npu()
    with pytest.raises(RuntimeError, match="group_list must have at most 1024 groups for 1 weights, but has 1025"):
        npu.npu_grouped_matmul(
            [zeros(1025, 1)], [zeros(1025, 1, 1)], group_list=ends, group_list_type=1, split_item=2, group_type=0
        )
    ends = ends[:129]
    with pytest.raises(RuntimeError, match="group_list must have at most 128 groups for 129 weights, but has 129"):
        npu.npu_grouped_matmul(
            [zeros(129, 1)], [zeros(1, 1)] * 129, group_list=ends, group_list_type=1, split_item=2, group_type=0
        )


def test_limits_of_token_permutation(npu: Any) -> None:
    tokens = zeros(2, 4)
    index = torch.zeros(2, 1, dtype=torch.int32).npu()
    npu.npu_moe_token_permute(tokens, torch.zeros(2, 512, dtype=torch.int32).npu())
    with pytest.raises(RuntimeError, match="topK must be at most 512, but got 513"):
        npu.npu_moe_token_permute(tokens, torch.zeros(2, 513, dtype=torch.int32).npu())
    with pytest.raises(RuntimeError, match="indices must have less than 16777215 elements, but got 16777216"):
        npu.npu_moe_token_permute(zeros(2**15, 1), index[:1].expand(2**15, 512))
    for number in (-1, 16777215):
        with pytest.raises(RuntimeError, match=r"indices must be in \[0, 16777215\), but go from"):
            npu.npu_moe_token_permute(tokens, torch.tensor([[0], [number]], dtype=torch.int32).npu())
    with pytest.raises(RuntimeError, match=r"tokens must be float16, bfloat16 or float32, but got torch\.float64"):
        npu.npu_moe_token_permute(tokens.double(), index)


@pytest.mark.parametrize("indices", [[0, 0], [0, 2], [-1, 0]])
def test_indices_that_are_no_permutation(npu: Any, indices: list[int]) -> None:
    rows = torch.tensor(indices, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="sorted_indices must hold every row from 0 to 1 once"):
        npu.npu_moe_token_unpermute(zeros(2, 4), rows)
    with pytest.raises(RuntimeError, match="out_index must hold every row from 0 to 1 once"):
        npu.npu_moe_token_unpermute_with_routing_map_grad(
            zeros(2, 4), rows, rows, torch.ones(2, 1, dtype=torch.bool).npu(), zeros(2, 4), zeros(2, 1), True, [2, 4]
        )
    with pytest.raises(RuntimeError, match=r"sorted_indices must be int32, but got torch\.int64"):
        npu.npu_moe_token_unpermute(zeros(2, 4), rows.long())


def test_types_of_the_weight_of_add_rms_norm(npu: Any) -> None:
    x, gamma = zeros(2, 4, dtype=torch.bfloat16), zeros(4)
    with pytest.raises(RuntimeError, match=r"gamma must have the type of x1, torch\.bfloat16, but got torch\.float32"):
        npu.npu_add_rms_norm(x, x, gamma)


def test_shapes_that_the_gradient_of_attention_takes(npu: Any) -> None:
    x, statistics = zeros(1, 2, 3, 4), zeros(1, 2, 3, 8)
    options = {"softmax_max": statistics, "softmax_sum": statistics, "attention_in": x}
    assert npu.npu_fusion_attention_grad(x, x, x, x, 2, "BNSD", **options)[0].shape == x.shape
    for changes in ({"attention_in": x[:, :, :2]}, {"softmax_sum": statistics[:, :1]}, dict.fromkeys(options, x)):
        with pytest.raises(RuntimeError, match="dy and attention_in must have one shape, softmax_max and softmax_sum"):
            npu.npu_fusion_attention_grad(x, x, x, x, 2, "BNSD", **options | changes)
