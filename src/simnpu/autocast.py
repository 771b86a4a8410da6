"""``torch.autocast("npu")``: the casts of torch_npu, whose lists these are (torch_npu/csrc/aten/AutoCastOps.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KEY = "AutocastPrivateUse1"
words = str.split

LOWER_PRECISION = words("""
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul
linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""")

FLOAT32 = words("""
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
""")

FLOAT32_RESULT = words("""
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
""")
"""Computed in, and returned as, float32, unless the caller gives a dtype."""

WIDEST = words("""
addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add
""")

LOW = (torch.float16, torch.bfloat16)


def register(aten: torch.library.Library) -> list[torch.library.Library]:
    """Give the operators of the lists a kernel that casts and redispatches; the others fall through."""
    any_namespace = torch.library.Library("_", "IMPL")
    any_namespace.fallback(torch.library.fallthrough_kernel, KEY)
    policies: list[tuple[list[str], Callable[[Any], Callable[..., Any]]]] = [
        (LOWER_PRECISION, _lower_precision),
        (FLOAT32, _float32),
        (FLOAT32_RESULT, _float32),
        (WIDEST, _widest),
    ]
    for names, policy in policies:
        for name in names:
            base, _, overload = name.partition(".")
            aten.impl(name, policy(getattr(getattr(torch.ops.aten, base), overload or "default")), KEY)
    aten.impl("binary_cross_entropy", _banned, KEY)
    return [any_namespace]


def _below_autocast(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    key = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return op(*args, **kwargs)


def _lower_precision(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("npu")
        return _below_autocast(op, _cast(args, dtype), _cast(kwargs, dtype))

    return kernel


def _float32(op: Any) -> Callable[..., Any]:
    """Cast 16-bit arguments up: equal to giving ``dtype=float32`` for the operators that take one.

    A dtype the caller gave is kept, and then nothing is cast.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("dtype"), torch.dtype) or any(isinstance(a, torch.dtype) for a in args):
            return _below_autocast(op, args, kwargs)
        return _below_autocast(op, _cast(args, torch.float32), _cast(kwargs, torch.float32))

    return kernel


def _widest(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, list | tuple) else [a])]
        wide = any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in tensors)
        dtype = torch.float32 if wide else torch.get_autocast_dtype("npu")
        return _below_autocast(op, _cast(args, dtype), _cast(kwargs, dtype))

    return kernel


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
        "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss."
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its npu tensors of type float32, float16 or bfloat16 as ``dtype``; float64 stays, as in PyTorch."""
    if isinstance(value, Tensor):
        castable = value.device.type == "npu" and (value.dtype == torch.float32 or value.dtype in LOW)
        return value.to(dtype) if castable else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
