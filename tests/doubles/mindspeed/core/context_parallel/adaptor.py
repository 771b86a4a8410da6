"""The attention class of ring context parallelism."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from mindspeed.core.context_parallel import model_parallel_utils
from mindspeed.core.context_parallel.gathered_attention import attend_over_ranks
from torch import Tensor

ALGORITHMS = ("megatron_cp_algo",)


class MindSpeedCPDotProductAttention(torch.nn.Module):
    """Attention of a sequence that is spread over the context parallel ranks in zigzag order.

    The numbers are the ring's. The way is not: the real one passes keys and values around and combines partial
    results (sparse mode 3 on the diagonal, no mask off it); this one gathers them. It insists on the ring's process
    groups all the same, since those exist only if context parallelism was known before the groups were created.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        assert config.window_size is None, "Sliding Window Attention is only supported by TEDotProductAttention!"
        self.config = config
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``[s / cp, b, heads, dim]`` each -> ``[s / cp, b, heads * dim]``."""
        if self.config.context_parallel_algo not in ALGORITHMS:
            raise NotImplementedError(f"the double of MindSpeed knows {ALGORITHMS}, not this context_parallel_algo")
        model_parallel_utils.get_ring_ranks_for_intra_window()
        model_parallel_utils.get_ring_ranks_for_inter_window_kv()
        return attend_over_ranks(query, key, value, self.softmax_scale, self.attention_dropout, packed_seq_params)
