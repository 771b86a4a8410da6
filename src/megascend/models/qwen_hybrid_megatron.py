"""Qwen3-Next and the text models of Qwen3.5 for mcore-bridge, which knows the latter with a vision tower only.

Import after Megatron.
"""

from __future__ import annotations

from mcore_bridge.model.gpts.qwen3_next_gdn import Qwen3NextGDNBridgeMixin, Qwen3NextLoader
from mcore_bridge.model.register import ModelMeta, register_model

TEXT_TYPES = ["qwen3_5_text", "qwen3_5_moe_text"]


class Qwen35TextBridge(Qwen3NextGDNBridgeMixin):
    """Names of the text models' checkpoints, which are those of a plain decoder."""


register_model(ModelMeta("megascend_qwen3_5_text", TEXT_TYPES, bridge_cls=Qwen35TextBridge, loader=Qwen3NextLoader))
