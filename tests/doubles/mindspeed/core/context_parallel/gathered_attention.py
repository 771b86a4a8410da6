"""Attention over a context parallel group by gathering keys and values. Not a module of the real MindSpeed."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from megatron.core import parallel_state
from mindspeed.core.transformer.flash_attention.generate_mask.generate_mask import COMPRESSED
from torch import Tensor

from megascend.reference.te.attention_core import unzigzag
from megascend.reference.te.collectives import gather_from_ranks


def attend_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, packed_seq_params: Any = None
) -> Tensor:
    """Causal attention of this rank's two chunks of the sequence to all keys before them.

    Each rank holds chunks ``rank`` and ``2 * size - 1 - rank`` of ``2 * size``. One kernel call a chunk: the keys end
    where the chunk ends, so the mask is a triangle aligned to the bottom right (sparse mode 3).

    Args:
        query, key, value: ``[s / size, b, heads, dim]``.

    Returns:
        ``[s / size, b, heads * dim]``.
    """
    if packed_seq_params is not None:
        # The real ones compute something wrong (kv-allgather) or fail like this (ring).
        raise AttributeError("'PackedSeqParams' object has no attribute 'kv_index'")
    group = parallel_state.get_context_parallel_group()
    rank, size, local = group.rank(), group.size(), query.shape[0]
    heads, chunk = query.shape[2], local // 2
    key, value = (
        unzigzag(gather_from_ranks(x, group).unflatten(0, (size, local)), 0, local).flatten(2) for x in (key, value)
    )
    mask = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=query.device).triu(diagonal=1)
    outputs = []
    for piece, position in zip(query.flatten(2).split(chunk), (rank, 2 * size - 1 - rank), strict=True):
        end = (position + 1) * chunk
        outputs.append(
            torch_npu.npu_fusion_attention(
                piece,
                key[:end],
                value[:end],
                heads,
                "SBH",
                pse=None,
                padding_mask=None,
                atten_mask=mask,
                scale=scale,
                pre_tockens=65536,
                next_tockens=0,
                keep_prob=1 - dropout,
                inner_precise=0,
                sparse_mode=3,
            )[0]
        )
    return torch.cat(outputs)
