"""The model in Megatron, by mcore-bridge: what its parameters are called in a checkpoint, and the scale of its attention."""

from __future__ import annotations

from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model.register import ModelLoader, ModelMeta, register_model


class ParrotBridge(GPTBridge):
    hf_attn_prefix, hf_mlp_prefix = "attn", "ff"


class ParrotLoader(ModelLoader):
    def __init__(self, config):
        config.softmax_scale = config.hf_config.attention_scale
        super().__init__(config)


register_model(ModelMeta("parrot", ["parrot"], bridge_cls=ParrotBridge, loader=ParrotLoader))
