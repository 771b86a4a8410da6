"""Mistral, Mixtral and Seed-OSS for mcore-bridge, which has their layers under other names. Import after Megatron."""

from __future__ import annotations

from mcore_bridge.model.gpts.minimax_m2 import MinimaxM2Bridge
from mcore_bridge.model.register import ModelMeta, register_model


class MixtralBridge(MinimaxM2Bridge):
    """Names of Mixtral's experts (``block_sparse_moe.experts.0.w1``), which MiniMax-M2 took over; there is no router bias."""


register_model(ModelMeta("megascend_decoder", ["mistral", "seed_oss"]))
register_model(ModelMeta("megascend_mixtral", ["mixtral"], bridge_cls=MixtralBridge))
