"""Products of groups of rows with one matrix each, by torch_npu's grouped operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grouped_product(left: Tensor, right: Tensor, ends: Tensor, *, by_rows: bool) -> Tensor:
    """One product a group, called as MindSpeed's grouped layers do. Not differentiable.

    Args:
        left: [n, k], the groups being of its rows; or [m, n], the groups being of the dimension that is summed over.
        right: [groups, k, m], or [n, k].
        ends: of each group; the last is n.
        by_rows: the former of either.

    Returns:
        [n, m]; or [groups, m, k].
    """
    import torch_npu  # type: ignore[reportMissingImports]

    (result,) = torch_npu.npu_grouped_matmul(
        [left],
        [right],
        bias=None,
        group_list=ends.long(),
        split_item=2 if by_rows else 3,  # one tensor, either way
        group_type=0 if by_rows else 2,
        group_list_type=0,
    )
    return result


class GroupedProduct(torch.autograd.Function):
    """``rows[group g] @ matrices[g]`` with its gradients; the operator has none of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """Args: rows [n, k], matrices [groups, k, m], ends [groups], the last of which is n."""
        ctx.save_for_backward(rows, matrices, ends)
        return grouped_product(rows, matrices, ends, by_rows=True)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad = outputs[0].contiguous()
        rows, matrices, ends = ctx.saved_tensors
        for_rows, for_matrices = ctx.needs_input_grad[:2]
        of_rows = grouped_product(grad, matrices.transpose(1, 2), ends, by_rows=True) if for_rows else None
        of_matrices = grouped_product(rows.T, grad, ends, by_rows=False) if for_matrices else None
        return of_rows, of_matrices, None
