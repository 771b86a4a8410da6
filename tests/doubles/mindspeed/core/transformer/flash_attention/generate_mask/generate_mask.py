"""The compressed causal mask that the fused attention expects."""

from __future__ import annotations

from typing import Any

import torch

COMPRESSED = 2048  # rows and columns, whatever the sequence length

_GLOBAL_ATTN_MASK: torch.Tensor | None = None


def set_attention_mask(attn_mask: torch.Tensor | None) -> None:
    """Replace the mask that all layers share."""
    global _GLOBAL_ATTN_MASK
    _GLOBAL_ATTN_MASK = attn_mask


def get_attention_mask(config: Any) -> torch.Tensor:
    """``[2048, 2048]`` bool, True above the diagonal; made once.

    Raises:
        RuntimeError: the configuration has neither ``use_flash_attn`` nor a ``micro_batch_size`` for a dense mask.
    """
    if _GLOBAL_ATTN_MASK is None:
        if not getattr(config, "use_flash_attn", False):
            if not hasattr(config, "micro_batch_size"):
                raise RuntimeError("Please set micro_batch_size or set use_flash_attn=True in config.")
            raise NotImplementedError("the double of MindSpeed makes no dense masks")
        ones = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device="npu")
        set_attention_mask(ones.triu(diagonal=1))
    assert _GLOBAL_ATTN_MASK is not None
    return _GLOBAL_ATTN_MASK
