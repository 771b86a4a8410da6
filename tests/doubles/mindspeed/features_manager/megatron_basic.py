"""megatron-core's configuration, norms, random states and rotary embedding."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.flavour import IS_0_16

CONFIG = "megatron.core.transformer.transformer_config"
ROPE = "megatron.core.models.common.embeddings.rope_utils"


class MegatronBasicFeature(MindSpeedFeature):
    """The changes that every level makes to megatron-core."""

    def __init__(self) -> None:
        super().__init__("megatron-basic", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--use-fused-rmsnorm", action="store_true")
        parser.add_argument("--use-fused-rotary-pos-emb", action="store_true")

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        from mindspeed.core.fusions import fused_rope
        from mindspeed.core.megatron_basic import arguments_basic
        from mindspeed.core.megatron_basic.megatron_basic import PTNorm, _set_cuda_rng_state
        from mindspeed.core.transformer.custom_layers.transformer_engine import TENorm

        for name, new in {
            f"{CONFIG}.TransformerConfig.__init__": arguments_basic.transformer_config_init_wrapper,
            f"{CONFIG}.TransformerConfig.__init_subclass__": classmethod(
                arguments_basic.transformer_config_init_subclass
            ),
            f"{CONFIG}.TransformerConfig.__post_init__": arguments_basic.transformer_config_post_init_wrapper,
            f"{CONFIG}.MLATransformerConfig.__init__": arguments_basic.transformer_config_init_wrapper,
            "megatron.core.tensor_parallel.random._set_cuda_rng_state": _set_cuda_rng_state,
            "megatron.core.models.gpt.gpt_layer_specs.LNImpl": PTNorm,
            "megatron.core.transformer.torch_norm.WrappedTorchNorm": PTNorm,
            "megatron.core.transformer.transformer_block.LayerNormImpl": PTNorm,
            "megatron.core.extensions.transformer_engine.TENorm": TENorm if IS_0_16 else PTNorm,
            f"{ROPE}._apply_rotary_pos_emb_bshd": fused_rope.apply_rotary_pos_emb_bshd,
            f"{ROPE}.apply_rotary_pos_emb": fused_rope.apply_rotary_pos_emb,
        }.items():
            patch_manager.register_patch(name, new)
