"""Context parallelism: the attention class by algorithm, and the ring's process groups."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.flavour import IS_0_16

STATE = "megatron.core.parallel_state"


class ContextParallelFeature(MindSpeedFeature):
    """Level 2. Without it (level 0) and with CP > 1, nobody replaces megatron-core's attention: building fails."""

    def __init__(self) -> None:
        super().__init__("context-parallel-size")

    def is_need_apply(self, args: Any) -> Any:
        return self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, 1)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--context-parallel-algo",
            default="megatron_cp_algo",
            choices=["megatron_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo", "ulysses_cp_algo"],
        )
        parser.add_argument("--attention-mask-type", default="causal", choices=["causal", "general"])
        parser.add_argument("--cp-window-size", type=int, default=1)
        for flag in ("--use-cp-send-recv-overlap", "--use-fused-ring-attention-update", "--megatron-cp-in-bnsd"):
            parser.add_argument(flag, action="store_true")

    def validate_args(self, args: Namespace) -> None:
        if args.context_parallel_size == 1:
            return
        if hasattr(args, "seq_length") and args.seq_length % (2 * args.context_parallel_size):
            raise AssertionError("sequence length must be divisible by 2 * context_parallel_size")
        if args.context_parallel_algo == "megatron_cp_algo":
            args.use_flash_attn = True
        elif args.context_parallel_algo == "kvallgather_cp_algo" and args.attention_mask_type != "causal":
            raise AssertionError("kvallgather_cp_algo only supports causal attention mask type")

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        if int(getattr(args, "context_parallel_size", 1)) == 1:
            return
        from mindspeed.core.context_parallel import model_parallel_utils as groups
        from mindspeed.core.context_parallel.adaptor import MindSpeedCPDotProductAttention
        from mindspeed.te.pytorch.attention.dot_product_attention import dot_product_attention

        if not IS_0_16:  # this branch takes the same class for every algorithm, though it knows kv-allgather only
            attention = dot_product_attention.MindSpeedTEDotProductAttention
        elif getattr(args, "context_parallel_algo", "megatron_cp_algo") == "kvallgather_cp_algo":
            attention = dot_product_attention.TEDotProductAttention
        else:
            attention = MindSpeedCPDotProductAttention
        for name, new in {
            "megatron.core.transformer.dot_product_attention.DotProductAttention": MindSpeedCPDotProductAttention,
            "megatron.core.extensions.transformer_engine.TEDotProductAttention": attention,
            f"{STATE}.initialize_model_parallel": groups.initialize_model_parallel_cp_wrapper,
            f"{STATE}.destroy_model_parallel": groups.destroy_model_parallel_cp_wrapper,
            f"{STATE}.get_context_parallel_group_for_send_recv_overlap": (
                groups.get_context_parallel_group_for_send_recv_overlap
            ),
        }.items():
            patch_manager.register_patch(name, new)
