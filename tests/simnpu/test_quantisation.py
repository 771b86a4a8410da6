"""Quantising operators and the quantised product: against float64 arithmetic element by element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError

pytestmark = pytest.mark.usefixtures("sim_npu")


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def check(codes: Tensor, scale: float, values: Tensor, limit: int = 127) -> None:
    """Check that every code is the integer nearest to value / scale."""
    for code, value in zip(codes.flatten().tolist(), values.double().flatten().tolist(), strict=True):
        assert abs(code) <= limit
        assert abs(code - value / scale) <= 0.5 + 1e-4


@pytest.mark.parametrize("smooth", ["none", "columns", "groups"])
def test_rows_over_their_largest(npu: Any, smooth: str) -> None:
    x, factors = make(2, 3, 16), make(3, 16, seed=1).abs() + 0.5
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)
    options: dict[str, Any] = {}
    if smooth == "columns":
        options = {"smooth_scales": factors[0].npu()}
    elif smooth == "groups":
        options = {"smooth_scales": factors.npu(), "group_index": ends.npu()}
    codes, scales = npu.npu_dynamic_quant(x.npu(), **options)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.int8, x.shape, torch.float32, (2, 3))
    group = [0, 1, 1, 1, 2, 2]
    for row in range(6):
        factor = {"none": torch.ones(16), "columns": factors[0], "groups": factors[group[row]]}[smooth]
        smoothed = x.view(6, 16)[row].double() * factor.double()
        scale = float(scales.view(6)[row])
        assert scale == pytest.approx(float(smoothed.abs().max()) / 127, rel=1e-6)
        check(codes.view(6, 16)[row].cpu(), scale, smoothed)


def test_what_quantising_rows_refuses(npu: Any) -> None:
    x = make(4, 8).npu()
    zeros = npu.npu_dynamic_quant(torch.zeros(2, 8, dtype=torch.float16).npu())
    assert (zeros[0].abs().max(), zeros[1].max()) == (0, 0)
    with pytest.raises(RuntimeError, match=r"input must be float16 or bfloat16, but got torch\.float32"):
        npu.npu_dynamic_quant(x.float())
    with pytest.raises(RuntimeError, match="input must have 2 to 8 dimensions, but got 1"):
        npu.npu_dynamic_quant(x[0])
    with pytest.raises(RuntimeError, match=r"smooth_scales must be \[8\]"):
        npu.npu_dynamic_quant(x, smooth_scales=x[:, :4])
    ends = torch.tensor([1, 3], dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match=r"group_index must rise to the 4 rows of x, but is \[1, 3\]"):
        npu.npu_dynamic_quant(x, smooth_scales=x[:2], group_index=ends)
    with pytest.raises(NotSimulatedError, match="the type 16 is not simulated"):
        npu.npu_dynamic_quant(x, dst_type=torch.quint4x2)


@pytest.mark.parametrize("shape", [(3, 200), (2, 3, 130)])
def test_blocks_over_their_largest(npu: Any, shape: tuple[int, ...]) -> None:
    x = make(*shape, dtype=torch.float16)
    codes, scales = npu.npu_dynamic_block_quant(x.npu())
    assert scales.shape == (*shape[:-1], 2)
    for row, (values, actual) in enumerate(zip(x.view(-1, shape[-1]), codes.cpu().view(-1, shape[-1]), strict=True)):
        for block, columns in enumerate((slice(0, 128), slice(128, None))):
            scale = float(scales.view(-1, 2)[row, block])
            assert scale == pytest.approx(float(values[columns].double().abs().max()) / 127, rel=1e-6)
            check(actual[columns], scale, values[columns])
    assert (npu.npu_dynamic_block_quant(x.npu(), min_scale=1.0)[1] == 1.0).all()
    with pytest.raises(
        RuntimeError, match="to int8 row_block_size must be 1 and col_block_size 128, but got 128 and 128"
    ):
        npu.npu_dynamic_block_quant(x.npu(), row_block_size=128)
    with pytest.raises(RuntimeError, match="round_mode must be rint"):
        npu.npu_dynamic_block_quant(x.npu(), round_mode="round")


@pytest.mark.parametrize(
    ("dtype", "largest", "mantissa"), [(torch.float8_e4m3fn, 448, 3), (torch.float8_e5m2, 57344, 2)]
)
def test_blocks_in_float8(npu: Any, dtype: torch.dtype, largest: int, mantissa: int) -> None:
    x = make(130, 100)
    values, scales = npu.npu_dynamic_block_quant(x.npu(), dst_type=dtype, row_block_size=128, col_block_size=64)
    assert (values.dtype, scales.shape) == (dtype, (2, 2))
    for i, rows in enumerate((slice(0, 128), slice(128, None))):
        for j, columns in enumerate((slice(0, 64), slice(64, None))):
            block, scale = x[rows, columns].double(), float(scales[i, j])
            assert scale == pytest.approx(float(block.abs().max()) / largest, rel=1e-6)
            error = (values.cpu()[rows, columns].double() * scale - block).abs()
            assert (error <= block.abs() * 2.0 ** -(mantissa + 1) * 1.001 + scale * 2.0**-6).all()


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize(
    ("kind", "dtype", "top"), [(292, torch.float8_e4m3fn, 8), (torch.float8_e5m2, torch.float8_e5m2, 15)]
)
def test_shared_exponents(npu: Any, axis: int, kind: Any, dtype: torch.dtype, top: int) -> None:
    x = make(70, 100) * torch.logspace(-3, 3, 100, base=2).bfloat16()
    x[:32, :32] = 0
    values, codes = npu.npu_dynamic_mx_quant(x.npu(), axis=axis, dst_type=kind)
    length = x.shape[axis]
    pairs = -(-length // 64)
    assert (values.dtype, values.shape, codes.dtype) == (dtype, x.shape, torch.uint8)
    assert codes.shape == ((pairs, 100, 2) if axis == 0 else (70, pairs, 2))
    lines = x if axis != 0 else x.t()
    quantised = (values if axis != 0 else values.t()).cpu().double()
    exponents = codes.cpu() if axis != 0 else codes.cpu().transpose(0, 1)
    for line in (0, 31, 32, len(lines) - 1):
        for block in range(-(-length // 32)):
            part = lines[line, block * 32 : block * 32 + 32].double()
            biggest = float(part.abs().max())
            expected = 0 if biggest == 0 else math.floor(math.log2(biggest)) - top + 127
            code = int(exponents[line, block // 2, block % 2])
            assert code == expected
            limit = torch.finfo(dtype).max
            nearest = (part / 2.0 ** (code - 127)).clamp(-limit, limit).float().to(dtype).double()
            torch.testing.assert_close(quantised[line, block * 32 : block * 32 + 32], nearest, rtol=0, atol=0)
    assert exponents.flatten(-2)[:, -(-length // 32) :].sum() == 0  # what fills the last pair


def test_what_shared_exponents_refuse(npu: Any) -> None:
    x = make(2, 64).npu()
    with pytest.raises(NotSimulatedError, match="the type float4_e2m1fn_x2 is not simulated"):
        npu.npu_dynamic_mx_quant(x)
    with pytest.raises(RuntimeError, match=r"\(block_size\) must be divisible by 32 and no greater than 1024"):
        npu.npu_dynamic_mx_quant(x, dst_type=npu.float8_e4m3fn, block_size=48)
    with pytest.raises(RuntimeError, match=r"Param \(axis\) is out of input dimension range"):
        npu.npu_dynamic_mx_quant(x, dst_type=npu.float8_e4m3fn, axis=2)


def test_given_scales(npu: Any) -> None:
    x, scales = make(3, 4, dtype=torch.float32) * 30, torch.tensor([0.5, 1.0, 2.0, 4.0])
    zeros = torch.tensor([1, -2, 3, 0], dtype=torch.int32)
    result = npu.npu_quantize(x.npu(), scales.npu(), zeros.npu(), torch.qint8, 1)
    expected = (x.double() / scales.double() + zeros).round().clamp(-128, 127)
    assert torch.equal(result.cpu().double(), expected)
    times = npu.npu_quantize(x.npu(), scales[:1].npu(), None, torch.quint8, -1, False)
    assert torch.equal(times.cpu().double(), (x.double() * 0.5).round().clamp(0, 255))
    with pytest.raises(RuntimeError, match=r"scales must have 1 or 3 elements, but got \[4\]"):
        npu.npu_quantize(x.npu(), scales.npu(), None, torch.qint8, 0)


@pytest.mark.parametrize("case", ["int8", "half", "brain", "tokens", "packed scale", "sums"])
def test_products_of_int8(npu: Any, case: str) -> None:
    x1, x2 = integers(5, 40), integers(40, 6, seed=1)
    scale, tokens = torch.rand(6) / 500 + 0.001, torch.rand(5) + 0.5
    bias = torch.arange(6, dtype=torch.int32) * 1000
    sums = x1.double() @ x2.double()
    options, expected = {
        "int8": ({"offset": torch.full((1,), 3.0)}, sums * scale.double() + 3),
        "half": ({"output_dtype": torch.float16, "bias": bias}, (sums + bias) * scale.double()),
        "brain": ({"output_dtype": torch.bfloat16, "bias": scale}, sums * scale.double() + scale.double()),
        "tokens": (
            {"output_dtype": torch.float16, "pertoken_scale": tokens},
            sums * scale.double() * tokens.double()[:, None],
        ),
        "packed scale": ({"output_dtype": torch.float16}, sums * scale.double()),
        "sums": ({"output_dtype": torch.int32, "bias": bias}, ((sums + bias) * scale.double()).round()),
    }[case]
    operand = npu.npu_trans_quant_param(scale.npu()) if case == "packed scale" else scale.npu()
    options = {name: value.npu() if isinstance(value, Tensor) else value for name, value in options.items()}
    result = npu.npu_quant_matmul(x1.npu(), x2.npu(), operand, **options)
    dtype = options.get("output_dtype", torch.int8)
    assert result.dtype == dtype
    if dtype == torch.int8:
        expected = expected.round().clamp(-128, 127)
        assert (result.cpu().double() - expected).abs().max() <= (case == "packed scale")
    else:
        rounding = {torch.float16: 2**-9, torch.bfloat16: 2**-8, torch.int32: 0}[dtype]
        torch.testing.assert_close(result.cpu().double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("blocks", ["mx", "groups", "tensor"])
def test_products_of_float8(npu: Any, blocks: str) -> None:
    """Quantise both and multiply, as MindSpeed's recipes do; the result is the product of the codes."""
    x, w = make(6, 160), make(5, 160, seed=1)
    kind = torch.float8_e4m3fn
    if blocks == "mx":
        (a, sa), (b, sb) = (npu.npu_dynamic_mx_quant(t.npu(), axis=-1, dst_type=kind) for t in (x, w))
        options = {
            "scale_dtype": npu.float8_e8m0fnu,
            "pertoken_scale_dtype": npu.float8_e8m0fnu,
            "group_sizes": [1, 1, 32],
        }
        scales = [torch.exp2(s.cpu().double() - 127).flatten(1)[:, :5].repeat_interleave(32, 1) for s in (sa, sb)]
        sb = sb.transpose(0, 1)
    elif blocks == "groups":
        a, sa = npu.npu_dynamic_block_quant(x.npu(), dst_type=kind)
        b, sb = npu.npu_dynamic_block_quant(w.npu(), dst_type=kind, row_block_size=128)
        options = {"group_sizes": [1, 128, 128]}
        scales = [
            sa.cpu().double().repeat_interleave(128, 1)[:, :160],
            sb.cpu().double().repeat_interleave(128, 1)[:, :160],
        ]
        sb = sb.transpose(0, 1)
    else:
        sa, sb = torch.tensor([0.02]).npu(), torch.tensor([0.03]).npu()
        a, b = (t.float().div(s.item()).to(kind).npu() for t, s in ((x, sa), (w, sb)))
        options = {}
        scales = [torch.tensor(0.02).double(), torch.tensor(0.03).double()]
    result = npu.npu_quant_matmul(a, b.t(), sb, pertoken_scale=sa, output_dtype=torch.bfloat16, **options)
    decoded = (a.cpu().double() * scales[0]) @ (b.cpu().double() * scales[1]).t()
    torch.testing.assert_close(result.cpu().double(), decoded, rtol=2**-7, atol=2**-7)
    assert (result.cpu().double() - x.double() @ w.double().t()).abs().max() < 2.5  # and close to what was meant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_dtype": torch.float16, "offset": torch.ones(1)}, "no combination of types for int8 matrices"),
        ({"pertoken_scale": torch.ones(5)}, r"scale torch\.float32, pertoken_scale torch\.float32, output torch\.int8"),
        ({"scale": torch.ones(6).half()}, r"scale torch\.float16, output torch\.int8"),
        ({"scale": torch.ones(5)}, r"scale must be \[1\] or \[6\], but got \[5\]"),
        (
            {"pertoken_scale": torch.ones(6), "output_dtype": torch.bfloat16},
            r"pertoken_scale must be \[5\], but got \[6\]",
        ),
        ({"group_sizes": [1, 2]}, "group_sizes only support input with three elements, but got 2"),
        ({"x2": torch.zeros(39, 6, dtype=torch.int8)}, "k of x1"),
        ({"x1": torch.zeros(5, 40)}, r"must both be int8 or float8, but got torch\.float32 and torch\.int8"),
    ],
)
def test_what_a_quantised_product_refuses(npu: Any, options: dict[str, Any], message: str) -> None:
    arguments = {"x1": integers(5, 40), "x2": integers(40, 6), "scale": torch.ones(6)} | options
    arguments = {name: value.npu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        npu.npu_quant_matmul(**arguments)
    with pytest.raises(NotSimulatedError, match="int4"):
        npu.npu_quant_matmul(arguments["x1"].int(), arguments["x2"].int(), arguments["scale"])
