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
INNER_LIMIT = 65536


def group_sizes(group_list: Tensor | Sequence[int], group_list_type: int, refuse: Refusal) -> list[int]:
    """Rows of each group, from cumulative ends or from counts."""
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
    check_lengths(x, weight, group_list, split_item, refuse)
    check_scenario(x, weight, group_list, split_item >= 2, group_type, refuse)
    check_bias(bias, weight, group_type, refuse)
    sizes = None if group_list is None else group_sizes(group_list, group_list_type, refuse)

    def run(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None) -> list[Tensor]:
        return grouped(list(x), list(weight), bias, sizes, group_type, split_item >= 2, refuse)

    return on_host(run)(list(x), list(weight), bias)


def check_lengths(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | Sequence[int] | None, split_item: int, refuse: Refusal
) -> None:
    """Check the numbers of tensors and groups against each other, and against their limits."""
    groups = None if group_list is None else len(group_list)
    if split_item < 2 and groups is not None and not (len(x) == 1 and len(weight) == groups):
        refuse(
            "Invalid inputs. When split_item = 0 or 1 and input group_list is not None, the following two conditions are "
            "supposed to be satisfied: (1) length of x equals 1; (2) length of weight equals that of group_list. Actual "
            f"lengths: x [{len(x)}], weight [{len(weight)}], group_list [{groups}]."
        )
    if split_item < 2 and groups is None and len(x) != len(weight):
        refuse(
            "When split_item = 0 or 1 and input group_list is None, the num of x tensors must equal the num of weight "
            f"tensors.Actual lengths: x [{len(x)}], weight [{len(weight)}]."
        )
    if groups is not None and groups > (limit := MAX_GROUPS if len(weight) == 1 else MAX_WEIGHTS):
        refuse.kernel(f"group_list must have at most {limit} groups for {len(weight)} weights, but has {groups}")
    if isinstance(group_list, (list, tuple)) and groups == 1:
        refuse.kernel("group_list as a list must not have length 1")
    for name, tensors in (("x", x), ("weight", weight)):
        if len(tensors) > MAX_WEIGHTS:
            refuse.kernel(f"{name} must have at most {MAX_WEIGHTS} tensors, but has {len(tensors)}")
        for tensor in tensors:
            if (inner := tensor.shape[-2 if is_transposed(tensor) else -1]) >= INNER_LIMIT:
                refuse.kernel(f"the inner axis of {name} must be less than {INNER_LIMIT}, but is {inner}")


def check_scenario(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | Sequence[int] | None, joined: bool, group_type: int,
    refuse: Refusal,
) -> None:  # fmt: skip
    """Check what torch_npu's table of scenarios says of single and several x, weights and results on a 910B."""
    listed = isinstance(group_list, (list, tuple))
    if not listed and joined != (group_type != UNGROUPED):
        allowed = "0 or 1" if group_type == UNGROUPED else "2 or 3"
        refuse.kernel(f"with group_type {group_type} split_item must be {allowed}")
    if len({tensor.dtype for tensor in (*x, *weight)}) > 1:
        refuse.kernel("x and weight must have one dtype: " + ", ".join(str(tensor.dtype) for tensor in (*x, *weight)))
    single = len(x) == len(weight) == 1
    if x[0].dtype == torch.float32 and not listed and not single:
        refuse.kernel(f"float32 needs a single x, weight and result, but got {len(x)} x and {len(weight)} weights")
    stacked = single and group_type == BY_ROWS and not listed
    for number, tensor in enumerate(weight):
        if tensor.dim() != (3 if stacked else 2):
            refuse.kernel(f"weight[{number}] must have {3 if stacked else 2} dimensions, but got {tensor.dim()}")
    if len({tensor.dim() for tensor in x}) > 1 or (group_list is not None and x[0].dim() != 2):
        refuse.kernel(f"x must have {'2' if group_list is not None else 'equal'} dimensions: {[t.dim() for t in x]}")
    if joined and len({tensor.shape[-1] for tensor in weight}) > 1:
        refuse.kernel(f"n of all weights must be equal, but got {[tensor.shape[-1] for tensor in weight]}")
    if len({is_transposed(tensor) for tensor in weight if min(tensor.shape[-2:]) > 1}) > 1:
        refuse.kernel("weights must all be transposed, or none")
    for number, tensor in enumerate(x):
        if min(tensor.shape[-2:]) > 1 and is_transposed(tensor) != (group_type == BY_INNER):
            refuse.kernel(
                f"x[{number}] {'must' if group_type == BY_INNER else 'must not'} be transposed with group_type {group_type}"
            )


def check_bias(bias: list[Tensor] | None, weight: list[Tensor], group_type: int, refuse: Refusal) -> None:
    """Check number and types of the biases."""
    if not bias:
        return
    if group_type == BY_INNER:
        refuse.kernel("bias must be None with group_type 2")
    if len(bias) != len(weight):
        refuse.kernel(f"bias must have as many tensors as weight, {len(weight)}, but has {len(bias)}")
    expected = torch.float16 if weight[0].dtype == torch.float16 else torch.float32
    if any(tensor.dtype != expected for tensor in bias):
        refuse.kernel(f"bias must be {expected} for {weight[0].dtype}, but got {bias[0].dtype}")


def is_transposed(tensor: Tensor) -> bool:
    """Check whether a matrix, or a stack of matrices, lies in memory column by column."""
    return not tensor.is_contiguous() and tensor.stride(-2) == 1 and tensor.stride(-1) >= tensor.shape[-2]


@operator
def npu_bmmV2(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """Batched matrix product; ``output_sizes``, if not empty, is the shape of the result."""

    if input.shape[:-2] != mat2.shape[:-2] or input.shape[-1] != mat2.shape[-2]:
        Refusal("npu_bmmV2", "aclnnBatchMatMul").kernel(
            f"batches and inner dimensions must be equal, but got {list(input.shape)} and {list(mat2.shape)}"
        )

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

    def accumulate(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        return total.add_(x.flatten(0, -2).float().t() @ weight.flatten(0, -2).float())

    on_host(accumulate)(x, weight, C)


@extension
def npu_groupmatmul_add_fp32(x: Tensor, weight: Tensor, group_list: Tensor, grad: Tensor) -> None:
    """grad[i] += x_i^T weight_i for every group of rows, in place; ``group_list`` holds cumulative ends."""
    refuse = Refusal("npu_groupmatmul_add_fp32", "GroupedMatmulInplaceAddOperation")
    sizes = group_sizes(group_list, CUMULATIVE, refuse)

    def accumulate(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        groups = total.view(len(sizes), x.shape[-1], weight.shape[-1])
        pairs = zip(pieces([x], sizes, 0, refuse), pieces([weight], sizes, 0, refuse), strict=True)
        for group, (left, right) in zip(groups, pairs, strict=True):
            group.add_(left.float().t() @ right.float())
        return total

    on_host(accumulate)(x, weight, grad)
