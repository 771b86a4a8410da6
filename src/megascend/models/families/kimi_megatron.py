"""Kimi-K2.5 to 2.7 for mcore-bridge, which knows them with their vision tower only: the text model. Import after Megatron."""

from __future__ import annotations

from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model.register import ModelMeta, register_model


class KimiK25TextBridge(GPTBridge):
    """Names of the checkpoints, in which the text model is a part of a model for images."""

    hf_layers_prefix = "language_model.model.layers"
    hf_embed_key = "language_model.model.embed_tokens.weight"
    hf_final_layernorm_key = "language_model.model.norm.weight"
    hf_lm_head_key = "language_model.lm_head.weight"
    hf_score_key = "language_model.score.weight"


register_model(ModelMeta("megascend_kimi_k25", ["kimi_k25"], bridge_cls=KimiK25TextBridge))
