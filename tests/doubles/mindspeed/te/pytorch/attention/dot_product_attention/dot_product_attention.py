"""Attention on the NPU's fused kernel, in the class that megatron-core's Transformer Engine specs name."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_npu
from megatron.core.transformer.enums import AttnMaskType
from mindspeed.args_utils import get_full_args
from mindspeed.core.context_parallel.gathered_attention import attend_over_ranks
from mindspeed.core.transformer.flash_attention.generate_mask.generate_mask import get_attention_mask
from mindspeed.flavour import IS_0_16, named_by_branch
from torch import Tensor

SPARSE_MODES = {"causal": 2, "general": 1}
"""By ``attention_mask_type``: 2 reads the mask as a compressed triangle, 1 takes it as it is."""


@named_by_branch
class TEDotProductAttention(torch.nn.Module):
    """Attention without context parallelism, and with the algorithm that gathers keys and values.

    A dense mask is passed on as it came; which masks go with which sparse mode is the kernel's to say. The window,
    the softmax type and everything else that the configuration may hold are ignored. Dropout acts in evaluation too.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if config.multi_latent_attention:
            k_channels = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        if config.context_parallel_size > 1:
            algorithm = get_full_args().context_parallel_algo if IS_0_16 else config.context_parallel_algo
            if algorithm != "kvallgather_cp_algo":
                raise ValueError(f"Unsupported CP strategy: {algorithm}. Available: kvallgather_cp_algo")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``[s, b, heads, dim]`` (packed: ``[t, heads, dim]``) each -> ``[s, b, heads * dim]`` (``[t, heads, dim]``)."""
        if attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
            self.config.sparse_mode = 2
            attention_mask = get_attention_mask(self.config)
        if self.config.context_parallel_size > 1:
            return attend_over_ranks(query, key, value, self.softmax_scale, self.attention_dropout, packed_seq_params)
        layout, lengths = "SBH", {"actual_seq_qlen": None, "actual_seq_kvlen": None}
        heads = query.shape[-2]
        if packed_seq_params is None:
            query, key, value = (x.flatten(2) for x in (query, key, value))
        else:
            layout = "TND"
            lengths = {
                "actual_seq_qlen": packed_seq_params.cu_seqlens_q.tolist(),
                "actual_seq_kvlen": packed_seq_params.cu_seqlens_kv.tolist(),
            }
        return torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            heads,
            layout,
            pse=None,
            padding_mask=None,
            atten_mask=attention_mask,
            scale=self.softmax_scale,
            pre_tockens=65536,
            next_tockens=0,
            keep_prob=1 - self.attention_dropout,
            inner_precise=0,
            sparse_mode=SPARSE_MODES.get(self.config.attention_mask_type, 0),
            **lengths,
        )[0]


if not IS_0_16:
    MindSpeedTEDotProductAttention = TEDotProductAttention
    del TEDotProductAttention
