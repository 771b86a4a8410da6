"""``npu_ring_attention_update``: merging two partial results of ring attention."""

from __future__ import annotations

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import on_host, operator


@operator
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [S, B, H], softmax_max and softmax_sum [B, N, S, 8] of attention over both parts' keys.

    Formula: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
    """
    if input_layout != "SBH":
        raise NotSimulatedError(f"npu_ring_attention_update with input_layout {input_layout}")

    def merge(*parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, maximum, total, new_out, new_maximum, new_total = parts
        largest = torch.maximum(maximum, new_maximum)
        weight, new_weight = total * torch.exp(maximum - largest), new_total * torch.exp(new_maximum - largest)
        merged = weight + new_weight

        def per_element(share: Tensor) -> Tensor:  # [B, N, S, 8] -> [S, B, N, 1]
            return share[..., :1].permute(2, 0, 1, 3)

        heads = maximum.shape[1]
        old = out.float().unflatten(-1, (heads, -1)) * per_element(weight / merged)
        new = new_out.float().unflatten(-1, (heads, -1)) * per_element(new_weight / merged)
        return (old + new).flatten(-2).to(out.dtype), largest, merged

    return on_host(merge)(
        prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max, cur_softmax_sum
    )
