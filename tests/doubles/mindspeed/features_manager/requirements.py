"""What has to be in place before megatron.core is imported: stand-in packages, and changes to torch itself."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import torch

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.flavour import IS_0_16

TRANSFORMER_ENGINE_CLASSES = (
    # every one an empty module: enough for megatron.core.extensions.transformer_engine to define its classes
    "common.recipe.DelayedScaling",
    "pytorch.DotProductAttention",
    "pytorch.GroupedLinear",
    "pytorch.LayerNormLinear",
    "pytorch.Linear",
    "pytorch.distributed.CudaRNGStatesTracker",
    "pytorch.distributed.activation_recompute_forward",
    "pytorch.fp8.FP8GlobalStateManager",
    "pytorch.fp8.fp8_autocast",
    "pytorch.ops.FusibleOperation",
    "pytorch.ops.GEGLU",
    "pytorch.ops.GELU",
    "pytorch.ops.ReGLU",
    "pytorch.ops.ReLU",
    "pytorch.ops.Sequential",
    "pytorch.ops.SwiGLU",
)


class RequirementsBasicFeature(MindSpeedFeature):
    """Transformer Engine, Apex and a few functions of torch."""

    def __init__(self) -> None:
        super().__init__("requirements-basic", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--optimization-level", type=int, choices=[0, 1, 2], default=2)
        parser.add_argument(
            "--optimizer-selection",
            default="fused_adamw",
            choices=["fused_adamw", "fused_torch_adamw", "fused_ema_adamw"],
        )

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        self._transformer_engine(patch_manager)
        self._apex(patch_manager, args)
        self._torch(patch_manager)

    def _transformer_engine(self, patch_manager: Any) -> None:
        from mindspeed.core.megatron_basic import requirements_basic as basic
        from mindspeed.te.pytorch.module.layernorm import Layernorm

        patch_manager.register_patch("torch.compile", basic.dummy_compile)
        patch_manager.register_patch("torch.jit.script", basic.dummy_compile)
        patch_manager.register_patch("importlib.metadata.version", basic.version_wrapper)
        patch_manager.register_patch("transformer_engine.pytorch.LayerNorm", Layernorm, create_dummy=True)
        for name in TRANSFORMER_ENGINE_CLASSES:
            patch_manager.register_patch(f"transformer_engine.{name}", torch.nn.Module, create_dummy=True)
        patch_manager.register_patch("flash_attn.flash_attn_interface.flash_attn_unpadded_func", create_dummy=True)
        if IS_0_16:
            import torch_npu

            patch_manager.register_patch("torch.cuda.nvtx.range_push", torch_npu.npu.mstx.range_start)
            patch_manager.register_patch("torch.cuda.nvtx.range_pop", torch_npu.npu.mstx.range_end)
            patch_manager.register_patch("fla.modules.l2norm.l2norm", create_dummy=True)

    def _apex(self, patch_manager: Any, args: Namespace) -> None:
        from mindspeed.core.megatron_basic import requirements_basic as basic
        from mindspeed.core.optimizer.adamw import AdamW, FusedTorchAdamW
        from mindspeed.ops.npu_matmul_add import npu_matmul_add_fp16, npu_matmul_add_fp32

        for name, new in {
            "amp_C.multi_tensor_l2norm": basic.multi_tensor_l2norm,
            "amp_C.multi_tensor_scale": basic.multi_tensor_scale,
            "apex.multi_tensor_apply.multi_tensor_applier": basic.multi_tensor_applier,
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32": npu_matmul_add_fp32,
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16": npu_matmul_add_fp16,
            "apex.optimizers.FusedSGD": torch.optim.SGD,
        }.items():
            patch_manager.register_patch(name, new, create_dummy=True)
        adam = {"fused_adamw": AdamW, "fused_torch_adamw": FusedTorchAdamW}.get(args.optimizer_selection)
        if adam is not None:
            patch_manager.register_patch("apex.optimizers.FusedAdam", adam, create_dummy=True)

    def _torch(self, patch_manager: Any) -> None:
        from mindspeed.core.megatron_basic import requirements_basic as basic

        patch_manager.register_patch("torch.nn.parameter.Parameter.type", basic.type_wrapper)
        patch_manager.register_patch("torch.Tensor.type", basic.type_wrapper)
        patch_manager.register_patch("torch.Tensor.view", basic.ensure_contiguous_wrapper)
        patch_manager.register_patch("torch.distributed.all_reduce", basic.torch_all_reduce_double_dtype_bypass_wrapper)
        if IS_0_16:
            from mindspeed.core.megatron_bridge_fix import get_device_capability
        else:
            from mindspeed.core.fusions.grouped_matmul import get_device_capability
        patch_manager.register_patch("torch.cuda.get_device_capability", get_device_capability)
