"""Errors and placeholders for features of Transformer Engine 2.8 to 2.11 that the reference does not support.

A name listed here can be imported, subclassed and used in ``isinstance``; calling it raises PlatformError with the name. Modules
that megatron-core imports in ``try`` / ``except ImportError`` are omitted on purpose, so that it reports the feature as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from megascend.errors import PlatformError

FP8 = "fp8 / fp4"
OVERLAP = "tp_comm_overlap"
ROUTER = "moe_router_fusion"
OPERATIONS = "use_transformer_engine_op_fuser"

LAYERS = ("LayerNormMLP", "MultiheadAttention", "TransformerLayer", "InferenceParams", "RotaryPositionEmbedding")
QUANTIZED = (
    "Quantizer", "QuantizedTensor", "QuantizedTensorStorage",
    "Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer", "NVFP4Quantizer",
    "Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor",
    "Float8TensorStorage", "Float8BlockwiseQTensorStorage", "MXFP8TensorStorage", "NVFP4TensorStorage",
)  # fmt: skip
QUANTIZED_FUNCTIONS = ("prepare_for_saving", "restore_from_saved")
PERMUTATION = (
    "moe_permute", "moe_permute_with_probs", "moe_unpermute", "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
)  # fmt: skip
CUDA_FUNCTIONS = ("get_cudnn_version", "get_device_compute_capability", "get_cpu_offload_context", "onnx_export")
ROUTING_CLASSES = ("FusedAuxLoss", "FusedComputeScoresForMoEAuxLoss", "FusedTopkScoreFunction")
ROUTING = ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
MULTI_TENSOR = (
    "multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_adam_fp8",
    "multi_tensor_sgd", "multi_tensor_unscale_l2norm",
)  # fmt: skip
OPS = (
    "FusibleOperation", "Sequential", "Linear", "AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "Bias",
    "ClampedSwiGLU", "ConstantScale", "Dropout", "GEGLU", "GELU", "Identity", "L2Normalization", "LayerNorm",
    "MakeExtraOutput", "QGEGLU", "QGELU", "Quantize", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "RMSNorm", "SReGLU",
    "SReLU", "SiLU", "SwiGLU",
)  # fmt: skip
RECIPE_STATES = (
    "RecipeState", "DelayedScalingRecipeState", "Float8CurrentScalingRecipeState", "Float8BlockScalingRecipeState",
    "MXFP8BlockScalingRecipeState", "NVFP4BlockScalingRecipeState", "CustomRecipeState",
)  # fmt: skip
RECIPE_FUNCTIONS = (
    "get_default_recipe", "get_default_fp8_recipe", "check_recipe_support", "get_align_size_for_quantization",
    "get_fp4_te_dtype", "get_fp8_te_dtype", "get_fp8_torch_dtype", "get_fp8_max", "split_and_copy",
)  # fmt: skip

LEFT_OUT = {
    "cpp_extensions": "CUDA kernels",
    "cpu_offload": "offloading of activations: cpu_offloading",
    "cpu_offload_v1": "offloading of activations: cpu_offloading",
    "cross_entropy": "fused cross entropy: cross_entropy_fusion_impl='te'",
    "export": "export to ONNX",
    "float8_tensor": "fp8",
    "graph": "CUDA graphs",
    "permutation": "fused permutation of tokens: moe_permute_fusion",
    "tensor.float8_tensor": "fp8",
    "tensor.mxfp8_tensor": "fp8",
    "tensor.nvfp4_tensor": "fp4",
    "tensor.utils": "fp8",
    "transformer": "Transformer Engine's own layers: only megatron-core's are run",
}
"""Modules of ``transformer_engine.pytorch`` that cannot be imported, and their purpose."""


def refuse(feature: str, remedy: str) -> NoReturn:
    """Raise PlatformError for a feature that only the real Transformer Engine has."""
    raise PlatformError(f"the reference Transformer Engine does not support {feature}; {remedy}")


def refuse_settings(layer: str, settings: dict[str, Any], megatron_names: dict[str, str] | None = None) -> None:
    """Raise PlatformError if any of ``settings`` of ``layer`` is truthy; name megatron-core's setting where one exists."""
    for name, value in settings.items():
        if value:
            setting = (megatron_names or {}).get(name, name)
            refuse(f"{layer}({name}={value!r})", f"switch {setting} off, or run on CUDA with transformer-engine")


REAL_ONE = "run on CUDA with transformer-engine"


def _remedy(setting: str | None) -> str:
    return REAL_ONE if setting is None else f"switch {setting} off, or {REAL_ONE}"


def unavailable(name: str, setting: str | None = None) -> Callable[..., NoReturn]:
    """Create a placeholder function: calling it raises PlatformError, which names the ``setting`` that uses it."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, _remedy(setting))

    function.__name__ = function.__qualname__ = name
    return function


class _Unavailable(type):
    """Metaclass of placeholder classes: looking up an attribute, for example a member of an enumeration, raises."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"the reference Transformer Engine does not support {cls.__name__}, which has no {name} here; {REAL_ONE}"
        )


def unavailable_class(name: str, setting: str | None = None) -> type:
    """Create a placeholder class: it may be subclassed and used in isinstance, but its construction raises PlatformError."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, _remedy(setting))

    return _Unavailable(name, (), {"__init__": __init__, "__doc__": f"Not available here; {_remedy(setting)}."})


def classes(names: tuple[str, ...], setting: str | None = None) -> dict[str, Any]:
    """Create, for each of ``names``, a class that cannot be constructed."""
    return {name: unavailable_class(name, setting) for name in names}


def functions(names: tuple[str, ...], setting: str | None = None) -> dict[str, Any]:
    """Create, for each of ``names``, a function that raises."""
    return {name: unavailable(name, setting) for name in names}
