"""Options that change nothing in this double, with the defaults that callers see (and configurations inherit)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.flavour import IS_0_16

SWITCHES = (
    "adaptive_cp_dynamic_attn_mask",
    "adaptive_cp_manually_set_mask_list",
    "adaptive_cp_only_reschedule",
    "adaptive_cp_without_coarse",
    "alibi_diagonal_opposite",
    "async_log_allreduce",
    "attention_mask_on_cpu",
    "balanced_moe_experts",
    "disable_gloo_group",
    "dist_train",
    "enable_recompute_layers_per_pp_rank",
    "fill_neg_inf",
    "gemm_gradient_accumulation_fusion",
    "hccl_group_buffer_adaptive",
    "jit_compile",
    "layerzero",
    "moe_allgather_overlap_comm",
    "moe_alltoall_overlap_comm",
    "moe_fb_overlap",
    "moe_permutation_async_comm",
    "moe_tp_extend_ep",
    "multi_head_latent_attention",
    "npu_deterministic",
    "quant_grads",
    "recompute_activation_function",
    "recompute_in_advance",
    "recompute_in_bubble",
    "recompute_norm",
    "reset_bucket_group_order",
    "reuse_fp32_param",
    "smart_swap",
    "square_alibi_mask",
    "swap_attention",
    "swap_optimizer",
    "tp_2d",
    "unaligned_linear",
    "use_ascend_coc",
    "use_ascend_mc2",
    "use_fused_moe_token_permute_and_unpermute",
    "use_fused_swiglu",
    "use_fusion_attn_v2",
    "use_ulysses_allgather_kv",
    "variable_seq_lengths",
)
VALUES: dict[str, Any] = {
    "alibi_fusion_attn_type": None,
    "compress_dense": "disable",
    "context_parallel_cache_interval": 0,
    "context_parallel_kv_cache_policy": None,
    "hccl_ep_group_buffer_adaptive_factor": -1.0,
    "hccl_group_buffer": None,
    "moe_zero_memory": "disable",
    "moe_zero_memory_num_layers": None,
    "n_shared_experts": None,
    "next_tockens": 0,
    "noop_layers": None,
    "param_and_grad_buffer_pad": None,
    "pre_tockens": 65536,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "quant_states": None,
    "recompute_activation_function_num_layers": None,
    "recompute_norm_num_layers": None,
    "schedules_method": None,
    "sparse_mode": 0,
    "swap_modules": "input_norm,self_attention,post_attention_norm",
    "swap_optimizer_times": 16,
    "tp_x": 1,
    "tp_y": 1,
    "ulysses_degree_in_cp": None,
    "virtual_optimizer": None,
}
SINCE_0_16 = {"hccl_op_mode": None, "use_batch_invariant_ops": False, "apply_rope_in_complex": False}


class OptionsFeature(MindSpeedFeature):
    """Declares them; never applies."""

    def __init__(self) -> None:
        super().__init__("options-of-features-that-the-double-lacks")

    def register_args(self, parser: ArgumentParser) -> None:
        for name, default in (dict.fromkeys(SWITCHES, False) | VALUES | (SINCE_0_16 if IS_0_16 else {})).items():
            flag = "--" + name.replace("_", "-")
            if default is False:
                parser.add_argument(flag, action="store_true")
            else:
                parser.add_argument(flag, type=str if default is None else type(default), default=default)

    def pre_validate_args(self, args: Namespace) -> None:
        """Read one of them, as the real features do: a configuration that has lost them fails here.

        ``dataclasses.replace`` makes such a one, with the constructor that the instance's own class got.
        """
        if args.moe_zero_memory_num_layers is not None:
            raise NotImplementedError("the double of MindSpeed has no moe_zero_memory")
