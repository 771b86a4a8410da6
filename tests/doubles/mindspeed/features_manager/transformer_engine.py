"""megatron-core's Transformer Engine classes, replaced by MindSpeed's own."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.flavour import IS_0_16

EXTENSION = "megatron.core.extensions.transformer_engine"


class TransformerEngineBasicFeature(MindSpeedFeature):
    """Applies at every level. Attention is left to the context parallel feature where that one is at work."""

    def __init__(self) -> None:
        super().__init__("transformer-engine-basic", optimization_level=0)

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        name = "transformer_engine.pytorch.tensor.QuantizedTensor"
        patch_manager.register_patch(name, torch.nn.Module, create_dummy=True)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        from mindspeed.te.pytorch.attention.dot_product_attention import dot_product_attention
        from mindspeed.te.pytorch.module import grouped_linear, layernorm_column_parallel_linear, linear

        prefix = "" if IS_0_16 else "MindSpeed"
        for module, name in (
            (linear, "TELinear"),
            (layernorm_column_parallel_linear, "TELayerNormColumnParallelLinear"),
            (grouped_linear, "TEGroupedLinear"),
            (grouped_linear, "TEColumnParallelGroupedLinear"),
            (grouped_linear, "TERowParallelGroupedLinear"),
        ):
            patch_manager.register_patch(f"{EXTENSION}.{name}", getattr(module, prefix + name))
        column, row = self._parallel_linears()
        patch_manager.register_patch(f"{EXTENSION}.TEColumnParallelLinear", column)
        patch_manager.register_patch(f"{EXTENSION}.TERowParallelLinear", row)
        if int(getattr(args, "context_parallel_size", 1)) == 1:
            attention = getattr(dot_product_attention, f"{prefix}TEDotProductAttention")
            patch_manager.register_patch(f"{EXTENSION}.TEDotProductAttention", attention)

    def _parallel_linears(self) -> tuple[type, type]:
        """0.16 brings classes of its own, which LoRA libraries do not recognise; 0.15 takes megatron-core's."""
        if IS_0_16:
            from mindspeed.te.pytorch.module.linear import TEColumnParallelLinear, TERowParallelLinear

            return TEColumnParallelLinear, TERowParallelLinear
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        return ColumnParallelLinear, RowParallelLinear
