"""Matrix products fused with a collective: all-gather before, reduce-scatter or all-reduce behind the product.

``hcom`` is the name that ``get_hccl_comm_name`` of a group's backend gives. Sums are taken in float32. Limits are those
of torch_npu's documentation for ``comm_mode`` ai_cpu; quantised inputs are simulated for the all-reduce alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.hccl_group import group_of
from simnpu.operators.dispatch import extension, on_host, operator
from simnpu.operators.norm import rms_norm
from simnpu.operators.refusal import Refusal, refuse_unsimulated

WORLD_SIZES = (2, 4, 8, 16, 32)
K_RANGE = range(256, 65535)
HALVES = (torch.float16, torch.bfloat16)


def check_product(
    refuse: Refusal, x1: Tensor, x2: Tensor, hcom: str, world_size: int, reduce_op: str, bias: Tensor | None,
    comm_turn: int, quantised: bool,
) -> None:  # fmt: skip
    """Check matrices and group as both operators require."""
    if quantised:
        raise NotSimulatedError(f"{refuse.operator} with quantised inputs is not simulated by simnpu")
    if world_size not in WORLD_SIZES:
        refuse(f"world_size should be in {list(WORLD_SIZES)}, but the actual value is {world_size}.")
    if world_size != (size := group_of(hcom).size()):
        refuse.kernel(f"world_size is {world_size}, but the group of hcom has {size} ranks")
    if x1.dim() != 2 or x2.dim() != 2:
        refuse(f"Both inputs of mm are required to be 2D, but the actual inputs are {x1.dim()}D and {x2.dim()}D.")
    if x1.shape[1] != x2.shape[0]:
        refuse(
            "The K-axis in the two inputs of Matmul must be equal, but in reality, the K-axis of x1 is "
            f"{x1.shape[1]} and the K-axis of x2 is {x2.shape[0]}."
        )
    if x1.shape[1] not in K_RANGE:
        refuse.kernel(f"k must be in [{K_RANGE.start}, {K_RANGE.stop}), but got {x1.shape[1]}")
    if x1.dtype not in HALVES or x1.dtype != x2.dtype:
        refuse.kernel(f"both inputs must be float16 or bfloat16, but got {x1.dtype} and {x2.dtype}")
    if x1.stride(-1) != 1:
        refuse.kernel("the first input must not be transposed")
    if reduce_op != "sum" or comm_turn != 0:
        refuse.kernel(f"reduce_op must be sum and comm_turn 0, but got {reduce_op} and {comm_turn}")
    if bias is not None and bool(bias.any()):
        refuse.kernel("a bias other than 0 is not supported")


@operator
def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(rows of all ranks) @ x2 [world * m, n], and those rows [world * m, k] (empty without ``gather_output``)."""
    refuse = Refusal("npu_all_gather_base_mm", "aclnnAllGatherMatmul")
    quantised = x1_scale is not None or x2_scale is not None or output_dtype is not None
    check_product(refuse, input, x2, hcom, world_size, "sum", bias, comm_turn, quantised)
    if gather_index != 0:
        refuse.kernel(f"gather_index must be 0, but got {gather_index}")
    rows = input.detach().contiguous()
    gathered = rows.new_empty(world_size * rows.shape[0], rows.shape[1])
    dist.all_gather_into_tensor(gathered, rows, group=group_of(hcom))
    output = on_host(lambda a, b: (a.float() @ b.float()).to(a.dtype))(gathered, x2)
    return output, gathered if gather_output else gathered.new_empty(0)


@operator
def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> Tensor:
    """Compute this rank's rows [m / world, n] of the sum over ranks of input @ x2."""
    refuse = Refusal("npu_mm_reduce_scatter_base", "aclnnMatmulReduceScatter")
    quantised = x1_scale is not None or x2_scale is not None or output_dtype is not None
    check_product(refuse, input, x2, hcom, world_size, reduce_op, bias, comm_turn, quantised)
    if input.shape[0] % world_size:
        refuse("The M-axis in input of Matmul should be be divisible by world_size.")
    product = on_host(lambda a, b: a.float() @ b.float())(input, x2)
    shard = product.new_empty(product.shape[0] // world_size, product.shape[1])
    dist.reduce_scatter_tensor(shard, product, group=group_of(hcom))
    return shard.to(input.dtype)


def dequantised_product(
    refuse: Refusal, x1: Tensor, x2: Tensor, bias: Tensor | None, scale: Tensor | None, pertoken: Tensor | None
) -> Tensor:
    """x1 @ x2 + bias in float32; of int8 matrices the exact sum times the scales of columns and rows."""
    if x2.dim() != 2:
        refuse(f"x2 needs to be 2D, but got: {x2.dim()}D")
    if x1.shape[-1] != x2.shape[0]:
        refuse(f"K of x1 and x2 should be same, but they are x1_k: {x1.shape[-1]}, x2_k: {x2.shape[0]}")
    integers = x1.dtype == torch.int8
    if x1.dtype != x2.dtype or not (integers or x1.dtype in HALVES):
        refuse.kernel(f"x1 and x2 must both be float16, bfloat16 or int8, but got {x1.dtype} and {x2.dtype}")
    if integers == (scale is None):
        refuse(
            "when both dtype of x1 and dtype of x2 are equal to int8, dequantScale must be given"
            if integers
            else "when neither dtype of x1 or dtype of x2 is equal to int8, antiquantScale, antiquantOffset and "
            "dequantScale should all be null"
        )

    def multiply(x1: Tensor, x2: Tensor, bias: Tensor | None, scale: Tensor | None, pertoken: Tensor | None) -> Tensor:
        offset = torch.zeros(()) if bias is None else bias
        if scale is None:
            return x1.float() @ x2.float() + offset.float()
        scaled = (x1.double() @ x2.double() + offset.double()) * scale.double()  # sums of int8 products are exact
        if pertoken is not None:
            scaled = scaled * pertoken.double().view(*x1.shape[:-1], 1)
        return scaled.float()

    return on_host(multiply)(x1, x2, bias, scale, pertoken)


@operator
def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    x3: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    comm_quant_scale_1: Tensor | None = None,
    comm_quant_scale_2: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
    comm_mode: str | None = None,
) -> Tensor:
    """Compute the sum over ranks of x1 @ x2 + bias + x3, in the type of ``x1``; of int8 matrices in that of ``dequant_scale``."""
    refuse = Refusal("npu_mm_all_reduce_base", "aclnnMatmulAllReduce")
    refuse_unsimulated(
        "npu_mm_all_reduce_base", antiquant_scale=antiquant_scale, comm_quant_scale_1=comm_quant_scale_1,
        comm_quant_scale_2=comm_quant_scale_2, group_sizes=group_sizes, y_dtype=y_dtype, x1_dtype=x1_dtype,
        x2_dtype=x2_dtype, dequant_scale_dtype=dequant_scale_dtype, pertoken_scale_dtype=pertoken_scale_dtype,
        comm_quant_mode=comm_quant_mode or None,
    )  # fmt: skip
    if reduce_op != "sum":
        refuse.kernel(f"reduce_op must be sum, but got {reduce_op}")
    product = dequantised_product(refuse, x1, x2, bias, dequant_scale, pertoken_scale)
    if x3 is not None:
        product = product + x3.float()
    dist.all_reduce(product, group=group_of(hcom))
    return product.to(x1.dtype if dequant_scale is None else scale_type(dequant_scale))


def scale_type(scale: Tensor) -> torch.dtype:
    """Type of the product of int8 matrices: bfloat16 with scales of that type, else float16."""
    return torch.bfloat16 if scale.dtype == torch.bfloat16 else torch.float16


@extension
def npu_mm_all_reduce_add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: str,
    reduce_op: str = "sum",
    epsilon: float = 1e-6,
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
) -> tuple[Tensor, Tensor]:
    """y = residual + sum over ranks of x1 @ x2, and its rms_norm; the operator that MindSpeed builds."""
    reduced = npu_mm_all_reduce_base(
        x1, x2, hcom, reduce_op=reduce_op, bias=bias, antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset, dequant_scale=dequant_scale, comm_turn=comm_turn,
    )  # fmt: skip

    def add_and_normalise(reduced: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = reduced.view(residual.shape).float() + residual.float()
        return total.to(residual.dtype), rms_norm(total, gamma, epsilon)[0].to(residual.dtype)

    return on_host(add_and_normalise)(reduced, residual, gamma)
