"""Matrix products of mixture-of-experts layers: ``npu_grouped_matmul`` and what accumulates into main gradients.

Quantised variants are not simulated. None of these is differentiable, as in torch_npu; callers write the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import differentiable, extension, on_host, operator, overload
from simnpu.operators.refusal import Refusal, refuse_unsimulated

UNGROUPED, BY_ROWS, BY_INNER = -1, 0, 2  # group_type: no grouping; along m; along k
CUMULATIVE, COUNTS = 0, 1  # group_list_type
KERNEL = "aclnnGroupedMatmulV4"
MAX_GROUPS, MAX_WEIGHTS = 1024, 128  # groups of one stacked weight, and of separate ones
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_grouped_types(x: Sequence[Tensor], refuse: Refusal) -> None:
    """Type of the left factors."""
    for number, tensor in enumerate(x):
        if tensor.dtype not in FLOATS:
            refuse.kernel(f"x[{number}] must be float16, bfloat16 or float32, but got {tensor.dtype}")


def group_sizes(group_list: Tensor | Sequence[int], group_list_type: int, refuse: Refusal) -> list[int]:
    """Rows of each group, from cumulative ends or from counts."""
    if isinstance(group_list, Tensor) and group_list.dtype != torch.int64:
        refuse.kernel(f"group_list must be int64, but got {group_list.dtype}")
    values = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    if group_list_type not in (CUMULATIVE, COUNTS):
        refuse.kernel(f"group_list_type must be 0 or 1, but got {group_list_type}")
    sizes = (
        values if group_list_type == COUNTS else [end - start for start, end in zip([0, *values], values, strict=False)]
    )
    for number, size in enumerate(sizes):
        if size < 0:
            if group_list_type == COUNTS or number == 0:
                refuse(f"group_list[{number}] should be larger than or equal to 0, but now is {size}.")
            refuse(
                f"group_list[{number}] - group_list[{number - 1}] should be larger than or equal to 0, but now is "
                f"{size}."
            )
    return sizes


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight + bias, summed in float32, in the type of ``x``."""
    result = x.float() @ weight.float()
    return (result if bias is None else result + bias.float()).to(x.dtype)


def grouped(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, sizes: list[int] | None, group_type: int,
    joined: bool, refuse: Refusal,
) -> list[Tensor]:  # fmt: skip
    """Compute the products of all groups: a list of them, or one tensor (``joined``)."""
    count = len(sizes) if sizes is not None else max(len(x), len(weight))
    if group_type == BY_INNER:
        products = [
            product(left, right, None)
            for left, right in zip(pieces(x, sizes, 1, refuse), pieces(weight, sizes, 0, refuse), strict=True)
        ]
        return [torch.stack(products)] if joined else products
    lefts = pieces(x, sizes, 0, refuse) if len(x) == 1 and sizes is not None else x
    rights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    if len(rights) == 1:
        rights *= count
    if not len(lefts) == len(rights) == count:
        refuse.kernel(f"{len(lefts)} x, {len(rights)} weights and {count} groups do not fit together")
    for left, right in zip(lefts, rights, strict=True):
        if left.shape[-1] != right.shape[-2]:
            refuse.kernel(f"k of x {list(left.shape)} and of weight {list(right.shape)} differ")
    biases: list[Any] = [None] * count if not bias else (list(bias[0]) if len(bias) == 1 and count > 1 else list(bias))
    products = [product(*parts) for parts in zip(lefts, rights, biases, strict=True)]
    return [torch.cat(products)] if joined else products


def pieces(tensors: list[Tensor], sizes: list[int] | None, dim: int, refuse: Refusal) -> list[Tensor]:
    """Cut a tensor into the groups. Rows behind the last group belong to none of them."""
    if len(tensors) != 1 or sizes is None:
        return tensors
    tensor = tensors[0]
    if sum(sizes) > tensor.shape[dim]:
        refuse.kernel(
            f"group_list names {sum(sizes)} rows, but the tensor {list(tensor.shape)} has {tensor.shape[dim]}"
        )
    if sum(sizes) < tensor.shape[dim]:
        refuse.kernel(
            f"group_list names {sum(sizes)} of {tensor.shape[dim]} rows: the kernel leaves the result of the others "
            "undefined"
        )
    return list(tensor.split(sizes, dim))


@operator
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = CUMULATIVE,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """x_i @ weight_i + bias_i for every group i.

    Groups are rows of ``x`` (``group_type`` 0), or slices of the inner dimension (2: a weight gradient, with the result
    [groups, m, n]). ``split_item`` 0 and 1 return a list, 2 and 3 one tensor in a list.
    """
    refuse_unsimulated(
        "npu_grouped_matmul", scale=scale or None, offset=offset or None, antiquant_scale=antiquant_scale or None,
        antiquant_offset=antiquant_offset or None, per_token_scale=per_token_scale or None,
        activation_input=activation_input or None, output_dtype=output_dtype, x_dtype=x_dtype,
        weight_dtype=weight_dtype, scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype,
    )  # fmt: skip
    return grouped_matmul(x, weight, bias, group_list, split_item, group_type, group_list_type, act_type)


@overload("npu_grouped_matmul.List")
def npu_grouped_matmul_list(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = CUMULATIVE,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Compute :func:`npu_grouped_matmul` for rows whose cumulative ends are a list: ``group_type`` is not read."""
    refuse_unsimulated(
        "npu_grouped_matmul", scale=scale or None, offset=offset or None, antiquant_scale=antiquant_scale or None,
        antiquant_offset=antiquant_offset or None, per_token_scale=per_token_scale or None,
        activation_input=activation_input or None, output_dtype=output_dtype,
    )  # fmt: skip
    return grouped_matmul(x, weight, bias, group_list, split_item, group_type, group_list_type, act_type)


def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group_list: Tensor | Sequence[int] | None,
    split_item: int | None, group_type: int | None, group_list_type: int | None, act_type: int | None,
) -> list[Tensor]:  # fmt: skip
    """Check a call as torch_npu and its kernel do, and compute it."""
    refuse = Refusal("npu_grouped_matmul", KERNEL)
    split_item, group_list_type = split_item or 0, group_list_type or CUMULATIVE
    if not x or not weight:
        refuse("Invalid inputs: neither x nor weight could be empty.")
    if group_type is None and not isinstance(group_list, (list, tuple)):
        refuse("Requires manual passing group_type, current is None.")
    if split_item not in range(4):
        refuse(f"Invalid value of split_item [{split_item}], which should only be one of 0/1/2/3.")
    group_type = BY_ROWS if group_type is None else group_type
    if group_type not in (UNGROUPED, BY_ROWS, BY_INNER):
        refuse(
            f"Use Tensor input with current cann version, The group type must be -1, 0 or 2, but now is [{group_type}]"
        )
    if group_type != UNGROUPED and group_list is None:
        refuse.kernel(f"group_list must be given with group_type {group_type}")
    if group_type == UNGROUPED and group_list is not None:
        refuse.kernel("with group_type -1 group_list must be None")
    if act_type:
        raise NotSimulatedError(f"npu_grouped_matmul with act_type {act_type} is not simulated by simnpu")
    if isinstance(group_list, (list, tuple)) and group_type != BY_ROWS:
        refuse.kernel(
            f"with group_list as a list group_type must be None, but got {group_type}, which torch_npu ignores and "
            "groups rows: pass group_list as a Tensor"
        )
    check_grouped_types(x, refuse)
    if len({tensor.dtype for tensor in (*x, *weight)}) > 1:
        refuse.kernel("x and weight must have one dtype: " + ", ".join(str(tensor.dtype) for tensor in (*x, *weight)))
    sizes = None if group_list is None else group_sizes(group_list, group_list_type, refuse)
    if sizes is not None and len(sizes) > (limit := MAX_GROUPS if len(weight) == 1 else MAX_WEIGHTS):
        refuse.kernel(f"group_list must have at most {limit} groups for {len(weight)} weights, but has {len(sizes)}")

    def run(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None) -> list[Tensor]:
        return grouped(list(x), list(weight), bias, sizes, group_type, split_item >= 2, refuse)

    return on_host(run)(list(x), list(weight), bias)


@operator
def npu_bmmV2(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """Batched matrix product; ``output_sizes``, if not empty, is the shape of the result."""

    def product_of(left: Tensor, right: Tensor) -> Tensor:
        result = (left.float() @ right.float()).to(left.dtype)
        return result.view(*output_sizes) if output_sizes else result

    return differentiable(product_of)(input, mat2)


@operator
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input weight^T + bias."""
    return differentiable(lambda x, w, b: product(x, w.t(), b))(input, weight, bias)


@extension
def npu_matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:
    """C += x^T weight, in place, ``C`` in float32: a weight gradient added to Megatron's main gradient."""
    if C.dtype != torch.float32:
        Refusal("npu_matmul_add_fp32", "LinearOperation").kernel(f"C must be float32, but got {C.dtype}")

    def accumulate(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        return total.add_(x.flatten(0, -2).float().t() @ weight.flatten(0, -2).float())

    on_host(accumulate)(x, weight, C)


@extension
def npu_groupmatmul_add_fp32(x: Tensor, weight: Tensor, group_list: Tensor, grad: Tensor) -> None:
    """grad[i] += x_i^T weight_i for every group of rows, in place; ``group_list`` holds cumulative ends."""
    refuse = Refusal("npu_groupmatmul_add_fp32", "GroupedMatmulInplaceAddOperation")
    if grad.dtype != torch.float32:
        refuse.kernel(f"grad must be float32, but got {grad.dtype}")
    sizes = group_sizes(group_list, CUMULATIVE, refuse)

    def accumulate(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        groups = total.view(len(sizes), x.shape[-1], weight.shape[-1])
        pairs = zip(pieces([x], sizes, 0, refuse), pieces([weight], sizes, 0, refuse), strict=True)
        for group, (left, right) in zip(groups, pairs, strict=True):
            group.add_(left.float().t() @ right.float())
        return total

    on_host(accumulate)(x, weight, grad)
