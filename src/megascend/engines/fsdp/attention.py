"""Causal attention within each sample, as a function that transformers' models call.

What is in a micro batch comes with every call of the model, as a keyword that its layers pass on. A model whose layers do not is
refused: its samples would see each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megascend.errors import ConfigError

KEYWORD = "sample_lengths"
REFUSED = ("softcap", "s_aux")
"""Keywords of attention functions for what is not computed here: a cap of the scores, sinks."""


@dataclass(frozen=True)
class SampleLengths:
    """How the samples of a micro batch lie in its tensors.

    Attributes:
        packed: tokens of each sample, one after the other in one row; None: one sample a row, padded on the right.
    """

    packed: tuple[int, ...] | None


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """See ``transformers.AttentionInterface``.

    Args:
        query: [batch, heads, tokens, head dim]; ``key`` and ``value`` may have fewer heads.
        sliding_window: tokens that each token sees, itself among them; None: all before it.
        options: ``sample_lengths`` among them.

    Returns:
        [batch, tokens, heads, head dim], and None for the weights.

    Raises:
        ConfigError: the model's attention is not what is computed here.
    """
    lengths = options.get(KEYWORD)
    if not isinstance(lengths, SampleLengths):
        raise ConfigError(
            f"engine fsdp: {type(module).__name__} does not pass keywords on to its attention function, so that samples in one "
            "micro batch would see each other; use another engine"
        )
    asked = [name for name in REFUSED if options.get(name) is not None]
    if asked or not getattr(module, "is_causal", True):
        what = asked[0] if asked else "is_causal=False"
        raise ConfigError(
            f"engine fsdp: attention with {what} ({type(module).__name__}) is not known here; use another engine"
        )
    queries, keys, values = (
        whole.split(lengths.packed, dim=2) if lengths.packed else (whole,) for whole in (query, key, value)
    )
    parts = [_causal(q, k, v, scaling, dropout, sliding_window) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    length, mask = q.shape[2], None
    if window is not None and window < length:
        places = torch.arange(length, device=q.device)
        apart = places[:, None] - places[None, :]
        mask = (apart >= 0) & (apart < window)
    return scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
