"""The modules of the stand-in ``transformer_engine`` package: which name lies where.

Names that megatron-core looks for in try / except ImportError blocks (fused rope, permutation, cross entropy, cpu
offload, cuda graphs) are left out on purpose: megatron-core then reports the feature as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from megascend.reference_te.unsupported import unavailable, unavailable_class

VERSION = "2.8.0"  # passes megatron-core's gates; no distribution metadata goes with it
ROOT = "transformer_engine"


def build_modules() -> dict[str, ModuleType]:
    """All modules by full name, each an attribute of its parent. Imports torch and the layers."""
    modules: dict[str, ModuleType] = {}
    for name, contents in _contents().items():
        module = ModuleType(name, "megascend's reference Transformer Engine")
        spec = ModuleSpec(name, loader=None, origin="megascend.reference_te", is_package=True)
        module.__spec__ = spec
        module.__path__ = []  # type: ignore[attr-defined]
        module.__package__ = name
        module.__dict__.update(contents, __getattr__=_absent(name))
        modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def _absent(module: str) -> Callable[[str], NoReturn]:
    """``__getattr__`` of a module: what it has not is an AttributeError, as programs that probe expect, and says whose it is."""

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"megascend's reference Transformer Engine has no {module}.{name}; the real one, on CUDA, may have it"
        )

    return __getattr__


def _contents() -> dict[str, dict[str, Any]]:
    from megascend.reference_te import attention, fp8, grouped_linear, linear, norms, optimizers, small_parts

    fp8_off, router_off, fused_mlp_off = "fp8 / fp4", "moe_router_fusion", "use_transformer_engine_op_fuser"
    return {
        ROOT: {"__version__": VERSION},
        f"{ROOT}.common": {},
        f"{ROOT}.common.recipe": {
            name: unavailable_class(name, fp8_off)
            for name in ("Recipe", "Format", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
        },
        f"{ROOT}.pytorch": {
            "Linear": linear.Linear,
            "LayerNormLinear": linear.LayerNormLinear,
            "GroupedLinear": grouped_linear.GroupedLinear,
            # peft looks whether a layer is one, whatever the layer.
            "LayerNormMLP": unavailable_class("LayerNormMLP", "use_transformer_engine_op_fuser"),
            "DotProductAttention": attention.DotProductAttention,
            "RMSNorm": norms.RMSNorm,
            "LayerNorm": norms.LayerNorm,
            "fp8_autocast": fp8.fp8_autocast,
            "fp8_model_init": fp8.fp8_model_init,
        },
        f"{ROOT}.pytorch.fp8": {
            "FP8GlobalStateManager": fp8.FP8GlobalStateManager,
            "fp8_autocast": fp8.fp8_autocast,
            "fp8_model_init": fp8.fp8_model_init,
        },
        f"{ROOT}.pytorch.attention": {
            # mcore-bridge warns if it finds neither; megatron-core looks for fused rope in ``attention.rope`` only.
            "apply_rotary_pos_emb": unavailable("apply_rotary_pos_emb", "apply_rope_fusion"),
            "_SplitAlongDim": small_parts.SplitAlongDim,
        },
        f"{ROOT}.pytorch.distributed": {
            "CudaRNGStatesTracker": small_parts.CudaRNGStatesTracker,
            "activation_recompute_forward": fp8.activation_recompute_forward,
            "checkpoint": unavailable("te_checkpoint", fp8_off),
        },
        f"{ROOT}.pytorch.ops": {
            name: unavailable_class(name, fused_mlp_off) for name in ("Sequential", "FusibleOperation")
        },
        f"{ROOT}.pytorch.router": {
            name: unavailable(name, router_off)
            for name in (
                "fused_topk_with_score_function",
                "fused_compute_score_for_moe_aux_loss",
                "fused_moe_aux_loss",
            )
        },
        f"{ROOT}.pytorch.tensor": {"QuantizedTensor": unavailable_class("QuantizedTensor", fp8_off)},
        f"{ROOT}.pytorch.optimizers": {
            "FusedAdam": optimizers.FusedAdam,
            "FusedSGD": optimizers.FusedSGD,
            "multi_tensor_applier": optimizers.multi_tensor_applier,
            "multi_tensor_l2norm": optimizers.multi_tensor_l2norm,
            "multi_tensor_scale": optimizers.multi_tensor_scale,
        },
    }
