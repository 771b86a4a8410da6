"""``npu_quant_matmul``: the product of two quantised matrices, brought back by their scales.

Sums of int8 products are exact; float8 values are multiplied in float32. Which types go together is torch_npu's table
for int8; int4 is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import on_host, operator
from simnpu.operators.quantisation import E8M0_BIAS
from simnpu.operators.quantised_types import dtype_of
from simnpu.operators.refusal import Refusal

MAX_LAST = 65535
FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn)
HALF, BRAIN, SINGLE, LONG, INT, BYTE = (
    torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.int8,
)  # fmt: skip
TABLE = (  # scale, offset, bias, pertoken_scale, output
    ((LONG, SINGLE), (None,), (INT, None), (None,), HALF),
    ((LONG, SINGLE), (SINGLE, None), (INT, None), (None,), BYTE),
    ((SINGLE, BRAIN), (None,), (INT, BRAIN, SINGLE, None), (SINGLE, None), BRAIN),
    ((SINGLE,), (None,), (INT, BRAIN, SINGLE, None), (SINGLE,), HALF),
    ((SINGLE, BRAIN), (None,), (INT, None), (None,), INT),
)
"""torch_npu's table of types for int8 matrices (npu_quant_matmul, 910B generation)."""


@operator
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """(x1 @ x2 + integer bias) * scale * pertoken_scale + offset or other bias, in ``output_dtype`` (default int8).

    int8: ``scale`` [1] or [n] (float32, bfloat16, or int64 of ``npu_trans_quant_param``), ``pertoken_scale`` [m]. float8:
    those, or scales of blocks: with ``group_sizes`` (m, n, k) in float32, or E8M0 codes [m, k / 64, 2] and [k / 64, n, 2].
    """
    refuse = Refusal("npu_quant_matmul", "aclnnQuantMatmulV4")
    if x1.dtype == torch.int32 or x2.dtype == torch.int32 or y_scale is not None:
        raise NotSimulatedError("npu_quant_matmul with int4 matrices or y_scale is not simulated by simnpu")
    if not 2 <= x1.dim() <= 6 or not 2 <= x2.dim() <= 6:
        refuse.kernel(f"x1 and x2 must have 2 to 6 dimensions, but got {x1.dim()} and {x2.dim()}")
    if x1.shape[-1] != x2.shape[-2]:
        refuse.kernel(f"k of x1 {list(x1.shape)} and of x2 {list(x2.shape)} differ")
    if max(x1.shape[-1], x2.shape[-1]) > MAX_LAST:
        refuse.kernel(f"the last dimensions must be at most {MAX_LAST}, but got {list(x1.shape)} and {list(x2.shape)}")
    if group_sizes is not None and len(group_sizes) != 3:
        refuse(f"group_sizes only support input with three elements, but got {len(group_sizes)}")
    output = dtype_of(output_dtype, torch.int8)
    codes = {dtype_of(kind, SINGLE) for kind in (scale_dtype, pertoken_scale_dtype)} == {torch.float8_e8m0fnu}
    if x1.dtype == x2.dtype == torch.int8:
        check_int8(refuse, scale, offset, bias, pertoken_scale, output, x1.shape[-2], x2.shape[-1])
    elif not {x1.dtype, x2.dtype} <= set(FLOAT8):
        refuse.kernel(f"x1 and x2 must both be int8 or float8, but got {x1.dtype} and {x2.dtype}")

    def multiply(
        x1: Tensor, x2: Tensor, scale: Tensor, offset: Tensor | None, pertoken: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if pertoken is not None and (codes or (group_sizes is not None and scale.dim() > 1)):
            left, right = by_blocks(refuse, x1, x2, pertoken, scale, group_sizes, codes)
            product = left.float() @ right.float()
        else:
            product = x1.double() @ x2.double()
            if bias is not None and bias.dtype == INT:
                product = product + bias.double()
            product = product * unpacked(scale).double()
            if pertoken is not None:
                product = product * pertoken.double().view(*([-1, 1] if pertoken.numel() > 1 else [1, 1]))
        if bias is not None and bias.dtype != INT:
            product = product + bias.to(product.dtype)
        if offset is not None:
            product = product + offset.to(product.dtype)
        if output.is_floating_point:
            return product.to(output)
        limits = torch.iinfo(output)
        return product.round().clamp(limits.min, limits.max).to(output)

    return on_host(multiply)(x1, x2, scale, offset, pertoken_scale, bias)


def check_int8(
    refuse: Refusal, scale: Tensor, offset: Tensor | None, bias: Tensor | None, pertoken: Tensor | None,
    output: torch.dtype, m: int, n: int,
) -> None:  # fmt: skip
    """Check the scales' shapes, and that the types are a row of the table."""
    for name, tensor, sizes in (
        ("scale", scale, (1, n)),
        ("offset", offset, (1, n)),
        ("pertoken_scale", pertoken, (m,)),
    ):
        if tensor is not None and (tensor.dim() != 1 or tensor.numel() not in sizes):
            refuse.kernel(f"{name} must be [{'] or ['.join(map(str, sizes))}], but got {list(tensor.shape)}")
    dtypes = [None if tensor is None else tensor.dtype for tensor in (scale, offset, bias, pertoken)]
    for *allowed, result in TABLE:
        if result == output and all(kind in kinds for kind, kinds in zip(dtypes, allowed, strict=True)):
            return
    names = ("scale", "offset", "bias", "pertoken_scale")
    combination = ", ".join(f"{name} {kind}" for name, kind in zip(names, dtypes, strict=True) if kind is not None)
    refuse.kernel(f"no combination of types for int8 matrices: {combination}, output {output}")


def unpacked(scale: Tensor) -> Tensor:
    """Decode a scale to float32, also from the int64 of ``npu_trans_quant_param``."""
    if scale.dtype != LONG:
        return scale.float()
    low = scale & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int().view(SINGLE)


def by_blocks(
    refuse: Refusal, x1: Tensor, x2: Tensor, scale1: Tensor, scale2: Tensor, group_sizes: Sequence[int] | None,
    codes: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply both matrices by the scales of their blocks."""
    if x1.dim() != 2 or x2.dim() != 2:
        raise NotSimulatedError("npu_quant_matmul with scales of blocks and more than two dimensions")
    m, k, n = x1.shape[0], x1.shape[1], x2.shape[1]
    if codes:
        sizes = (1, 1, 32)
        scale1 = torch.exp2(scale1.view(torch.uint8).float() - E8M0_BIAS).flatten(1)[:, : -(-k // 32)]
        scale2 = torch.exp2(scale2.view(torch.uint8).float() - E8M0_BIAS).transpose(1, 2).flatten(0, 1)[: -(-k // 32)]
    else:
        sizes = tuple(size or 1 for size in group_sizes or (1, 1, 1))
    block_m, block_n, block_k = sizes
    shapes = (-(-m // block_m), -(-k // block_k)), (-(-k // block_k), -(-n // block_n))
    if (tuple(scale1.shape), tuple(scale2.shape)) != shapes:
        refuse.kernel(
            f"with blocks {list(sizes)} of m, n and k the scales must be {list(shapes[0])} and {list(shapes[1])}, but got "
            f"{list(scale1.shape)} and {list(scale2.shape)}"
        )
    rows = scale1.repeat_interleave(block_m, 0)[:m].repeat_interleave(block_k, 1)[:, :k]
    columns = scale2.repeat_interleave(block_k, 0)[:k].repeat_interleave(block_n, 1)[:, :n]
    return x1.float() * rows, x2.float() * columns
