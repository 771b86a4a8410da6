"""Operators that MindSpeed compiles at run time against CANN: their Python modules, without a compiler.

``MindSpeedOpBuilder.load()`` calls ``torch.utils.cpp_extension.load`` with sources that link against ``torch_npu``.
Such a call is answered with the simulated operators below; every other extension is built as usual. The functions take
the positional arguments of the extension's bindings (mindspeed/ops/csrc).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators import activation, attention, matmul, mc2, moe, norm, optimizer, rope

ASCEND_LIBRARY = "-ltorch_npu"

ATTENTION_OPTIONS = """scale keep_prob pre_tokens next_tokens inner_precise prefix actual_seq_qlen actual_seq_kvlen
sparse_mode gen_mask_parallel sync pse_type q_start_idx kv_start_idx"""
GRADIENT_OPTIONS = """scale_value keep_prob pre_tokens next_tokens inner_precise seed offset numels prefix
actual_seq_qlen actual_seq_kvlen sparse_mode gen_mask_parallel sync pse_type q_start_idx kv_start_idx"""
MASKS = "pse padding_mask atten_mask "
STATISTICS = "softmax_max softmax_sum softmax_in attention_in "

Groups = Tensor | Sequence[int]


def attention_forward(*args: Any) -> tuple[Any, ...]:
    """Compute attention without autograd: MindSpeed's own Function calls it."""
    with torch.no_grad():
        options = dict(zip((MASKS + ATTENTION_OPTIONS).split(), args[5:], strict=True))
        return attention.npu_fusion_attention_v2(*args[:5], **options)


def attention_backward(*args: Any) -> tuple[Any, ...]:
    options = dict(zip((MASKS + STATISTICS + GRADIENT_OPTIONS).split(), args[6:], strict=True))
    return attention.npu_fusion_attention_grad_v2(*args[:6], **options)[:4]


def gmm(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group_list: Groups, group_type: int, group_list_type: int
) -> list[Tensor]:
    # MindSpeed's operator takes a list for every group_type, torch_npu's does not.
    if not isinstance(group_list, Tensor):
        group_list = torch.tensor(group_list, device=x[0].device)
    return matmul.npu_grouped_matmul(
        x, weight, bias=bias, group_list=group_list, split_item=3, group_type=group_type,
        group_list_type=group_list_type,
    )  # fmt: skip


def gmm_backward(
    grad: list[Tensor], x: list[Tensor], weight: list[Tensor], group_list: Groups, group_list_type: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Compute the gradients of x and of the weight; the empty list stands for the bias, which gets none."""
    d_x, _, d_bias = gmm_backward_fusion(grad, weight, group_list, group_list_type)
    d_weight = gmm([x[0].t()], grad, [], group_list, matmul.BY_INNER, group_list_type)
    return d_x, [d_weight[0].reshape(weight[0].shape)], d_bias


def gmm_backward_fusion(
    grad: list[Tensor], weight: list[Tensor], group_list: Groups, group_list_type: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Compute the gradient of x only: another operator adds that of the weight to main_grad."""
    transposed = [weight[0].transpose(-1, -2)]
    return gmm(grad, transposed, [], group_list, matmul.BY_ROWS, group_list_type), [], []


def ring_attention_update(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = dict(zip(("actual_seq_qlen", "input_layout"), args[6:], strict=False))
    return attention.npu_ring_attention_update(*args[:6], **options)


def mm_all_reduce_add_rms_norm_(*args: Any) -> tuple[Any, Any]:
    """Compute the operator without the underscore, with the sum written to the residual, its third argument."""
    total, normalised = mc2.npu_mm_all_reduce_add_rms_norm(*args)
    return args[2].copy_(total), normalised


GROUPED = {"npu_gmm": gmm, "npu_gmm_backward": gmm_backward, "npu_gmm_backward_fusion": gmm_backward_fusion}

EXTENSIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "fusion_attention_v2": {
        "npu_fusion_attention_v2": attention_forward,
        "npu_fusion_attention_grad_v2": attention_backward,
    },
    "grouped_matmul": GROUPED,
    "grouped_matmul_v2": GROUPED,
    "npu_apply_fused_adamw_v2": {"npu_apply_fused_adamw_v2": optimizer.npu_apply_fused_adamw_v2},
    "npu_dropout_add_layer_norm": {"npu_dropout_add_layer_norm": norm.npu_dropout_add_layer_norm},
    "npu_groupmatmul_add_fp32": {"npu_groupmatmul_add_fp32": matmul.npu_groupmatmul_add_fp32},
    "npu_matmul_add_fp32": {"npu_matmul_add_fp32": matmul.npu_matmul_add_fp32},
    "npu_mm_all_reduce_add_rms_norm": {"npu_mm_all_reduce_add_rms_norm": mc2.npu_mm_all_reduce_add_rms_norm},
    "npu_mm_all_reduce_add_rms_norm_": {"npu_mm_all_reduce_add_rms_norm_": mm_all_reduce_add_rms_norm_},
    "npu_moe_token_permute": {"npu_moe_token_permute": moe.npu_moe_token_permute},
    "npu_moe_token_unpermute": {"npu_moe_token_unpermute": moe.npu_moe_token_unpermute},
    "npu_ring_attention_update": {"npu_ring_attention_update": ring_attention_update},
    "npu_rotary_position_embedding": {"npu_rotary_position_embedding": rope.npu_rotary_position_embedding},
    "rms_norm": {"rms_norm": lambda x, gamma, epsilon: norm.npu_rms_norm(x, gamma, epsilon)[0]},
    "swiglu": {"swiglu": activation.npu_swiglu},
}
"""The functions of each extension that is simulated, by the name it is built under."""


MODULE = "torch.utils.cpp_extension"


@functools.cache
def install() -> None:
    """Wrap ``torch.utils.cpp_extension.load``, now or when a program imports its module.

    Importing it here would load setuptools into every process.
    """
    if MODULE in sys.modules:
        wrap_load(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, LoadHook())


class LoadHook(importlib.abc.MetaPathFinder):
    """Import hook that wraps ``load`` of the module once it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            wrap_load(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap_load(module: Any) -> None:
    """Make ``load`` return simulated operators for extensions that link torch_npu; it builds the others."""
    build = module.load

    @functools.wraps(build)
    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        if ASCEND_LIBRARY in (kwargs.get("extra_ldflags") or ()):
            return extension(name)
        return build(name, *args, **kwargs)

    module.load = load


def extension(name: str) -> types.SimpleNamespace:
    """Return the simulated extension of this name."""
    if name not in EXTENSIONS:
        raise NotSimulatedError(
            f"the operator extension {name!r}, which MindSpeed compiles against CANN, is not simulated by "
            f"simnpu (simulated: {', '.join(EXTENSIONS)}); switch off the feature that calls it"
        )
    return types.SimpleNamespace(**EXTENSIONS[name])
