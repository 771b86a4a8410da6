"""torch_npu's fused operators: causal attention without a dense mask, and products of groups of rows."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

COMPRESSED = 2048
"""Rows and columns of the triangle that stands for the mask of any length."""
EVERYTHING_BEFORE = 65536
"""``pre_tockens`` of plain causal attention, which does not use it."""
LEFT_UP_CAUSAL, BAND = 2, 4
"""Values of ``sparse_mode`` that take the compressed triangle."""


@cache
def compressed_triangle(device: torch.device) -> Tensor:
    """bool [2048, 2048], True above the diagonal, where attention is not allowed."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: tuple[int, ...] | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Each sample sees itself, up to each token.

    Args:
        query: [batch, heads, tokens, head dim]; ``key`` and ``value`` may have fewer heads, by which those divide.
        packed: tokens of each sample, one after the other in the only row; None: one sample a row, padded on the right.
        scaling: of the scores; default: 1 / sqrt(head dim).
        dropout: probability; the operator draws from the device's random state.
        window: tokens that each token sees, itself among them; None: all before it.

    Returns:
        [batch, heads, tokens, head dim of value].
    """
    import torch_npu  # type: ignore[reportMissingImports]

    options: dict[str, Any] = {
        "atten_mask": compressed_triangle(query.device),
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "keep_prob": 1.0 - dropout,
        "pre_tockens": EVERYTHING_BEFORE if window is None else window - 1,
        "next_tockens": 0,
        "sparse_mode": LEFT_UP_CAUSAL if window is None else BAND,
    }
    heads = query.shape[1]
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))  # [batch, tokens, heads, head dim]
    if packed is None:
        return torch_npu.npu_fusion_attention(q, k, v, heads, "BSND", **options)[0].transpose(1, 2)
    ends = list(accumulate(packed))
    mixed = torch_npu.npu_fusion_attention(
        q[0], k[0], v[0], heads, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends, **options
    )[0]
    return mixed[None].transpose(1, 2)


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
