"""torch_npu's fused operators: causal attention without a dense mask, and grouped matrix products."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

COMPRESSED = 2048
"""Rows and columns of the compressed causal mask, which serves any sequence length."""
EVERYTHING_BEFORE = 65536
"""``pre_tockens`` of plain causal attention, which ignores it."""
LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 2, 3, 4
"""Values of ``sparse_mode`` that use the compressed mask."""


# One mask for all layers and sequence lengths.
@cache
def compressed_triangle(device: torch.device) -> Tensor:
    """Return the compressed mask, bool [2048, 2048], True above the diagonal, where attention is masked out."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: tuple[int, ...] | None,
    keys: tuple[int, ...] | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each sample.

    Args:
        query: [batch, heads, tokens, head dim]; ``key`` and ``value`` may have fewer heads (GQA).
        packed: tokens of each sample, packed in a single row; None: one sample a row, padded on the right.
        keys: with ``packed``, its numbers of keys if a sample's queries are only its last tokens; default: ``packed``.
        scaling: factor of the scores; default: 1 / sqrt(head dim).
        dropout: probability; the operator draws from the device's random state.
        window: number of tokens that each token attends to, including itself; None: all preceding tokens.

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
        "sparse_mode": BAND if window is not None else LEFT_UP_CAUSAL if keys in (None, packed) else RIGHT_DOWN_CAUSAL,
    }
    heads = query.shape[1]
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))  # [batch, tokens, heads, head dim]
    if packed is None:
        return torch_npu.npu_fusion_attention(q, k, v, heads, "BSND", **options)[0].transpose(1, 2)
    ends, key_ends = (list(accumulate(lengths)) for lengths in (packed, keys or packed))
    mixed = torch_npu.npu_fusion_attention(
        q[0], k[0], v[0], heads, "TND", actual_seq_qlen=ends, actual_seq_kvlen=key_ends, **options
    )[0]
    return mixed[None].transpose(1, 2)


def grouped_product(left: Tensor, right: Tensor, ends: Tensor, *, by_rows: bool) -> Tensor:
    """Compute one matrix product a group, with the arguments of MindSpeed's grouped layers. Not differentiable.

    Args:
        left: with ``by_rows`` [n, k], grouped along its rows; else [m, n], grouped along the dimension that is summed over.
        right: with ``by_rows`` [groups, k, m]; else [n, k].
        ends: end of each group; the last is n.
        by_rows: select the grouped dimension.

    Returns:
        With ``by_rows`` [n, m]; else [groups, m, k].
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
    """Differentiable ``rows[group g] @ matrices[g]``; the operator itself has no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """Compute the product of rows [n, k] and matrices [groups, k, m]; ends [groups], the last of which is n."""
        ctx.save_for_backward(rows, matrices, ends)
        return grouped_product(rows, matrices, ends, by_rows=True)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Autograd may pass an expanded gradient, that of a sum for example.
        grad = outputs[0].contiguous()
        rows, matrices, ends = ctx.saved_tensors
        for_rows, for_matrices = ctx.needs_input_grad[:2]
        rows_grad = grouped_product(grad, matrices.transpose(1, 2), ends, by_rows=True) if for_rows else None
        matrices_grad = grouped_product(rows.T, grad, ends, by_rows=False) if for_matrices else None
        return rows_grad, matrices_grad, None
