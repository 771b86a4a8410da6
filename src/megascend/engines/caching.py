"""Which models of transformers have nothing but attention in the way of a token to those before it."""

from __future__ import annotations

from typing import Any

KNOWN = ("full_attention", "sliding_attention")


def other_attention(config: Any) -> str | None:
    """What a model of this configuration has beside attention whose keys and values can be kept; None: nothing."""
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(KNOWN))
    if kinds:
        return f"layers of kind {kinds[0]}"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if any(kind in str(rope) for kind in ("'dynamic'", "'longrope'")):
        return "rotary embeddings that depend on the length"
    if any(getattr(text, name, None) for name in ("attn_logit_softcapping", "attn_logit_softcap")):
        return "a cap of the scores"
    return None
