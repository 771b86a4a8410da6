"""Causal attention by torch_npu's fused operator, told where samples end and never given a dense mask."""

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
