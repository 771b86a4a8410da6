"""Rotary embedding, overwriting both megatron-core's and (with its ``apply_rotary_pos_emb``) mcore-bridge's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotate the first ``freqs.shape[-1]`` of the last dimension of ``t`` ``[s, b, h, d]``; the rest passes."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import _rotate_half

    if multi_latent_attention:
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    rotated, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], dim=-1)
    cos, sin = (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype)
    return torch.cat((rotated * cos + _rotate_half(rotated, rotary_interleaved) * sin, rest), dim=-1)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, cp_group: Any = None
) -> Tensor:
    """megatron-core's signature of some releases ago: newer arguments (``mla_rotary_interleaved``) do not fit."""
    from megatron.core.models.common.embeddings import rope_utils

    config.apply_rope_fusion = False  # Apex's kernel is not there
    options = {
        "rotary_interleaved": config.rotary_interleaved,
        "multi_latent_attention": config.multi_latent_attention,
        "mscale": mscale,
    }
    if cu_seqlens is None:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, **options)
    return rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=cp_group, **options)
