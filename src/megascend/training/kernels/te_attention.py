"""Attention of packed sequences with its log-sum-exps, by Transformer Engine's cuDNN kernel.

Its module returns no log-sum-exps. These are the functions of its context parallelism, from 2.8 on; later releases have renamed
and added arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions import fused_attn
from transformer_engine.pytorch.utils import get_cudnn_version

from megascend.training.kernels.prefix_attention import Packed

FIRST_CUDNN = (9, 6, 0)
SOME_RELEASES = {"dqkv_dtype", "dqkv_layout", "o_format", "do_format"}
"""Arguments that some releases require, and others derive from the layout and the dtype of the states."""


def returns_log_sums() -> bool:
    """Check whether cuDNN returns log-sum-exps of packed sequences without padding between them."""
    return get_cudnn_version() >= FIRST_CUDNN


class TransformerEngineParts:
    """A :class:`megascend.training.kernels.prefix_attention.PartKernel` of one call of a layer, in bf16 or fp16.

    Args:
        scale: of the products; None: 1 / sqrt(head dim).
        deterministic: sum the gradients always in the same order.
    """

    def __init__(self, scale: float | None, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._settings = {
            "fused_attention_backend": fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": scale,
            "qkv_layout": "thd_thd_thd",
            "dqkv_layout": "thd_thd_thd",
            "o_format": "thd",
            "do_format": "thd",
        }

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed, causal: bool) -> tuple[Tensor, Tensor]:
        states = {"q": query, "k": key, "v": value, "is_training": True}
        out, (log_sums, self._random_state, *_), *_ = self._call(fused_attn.fused_attn_fwd, states, packed, causal)
        return out, log_sums[..., 0]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, packed: Packed,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        states = {"q": query, "k": key, "v": value, "o": out, "d_o": grad, "dqkv_dtype": TE_DType[query.dtype]}
        states |= {"aux_ctx_tensors": [log_sums[..., None], self._random_state], "deterministic": self._deterministic}
        return tuple(self._call(fused_attn.fused_attn_bwd, states, packed, causal)[:3])

    def _call(self, function: Callable[..., Any], states: dict[str, Any], packed: Packed, causal: bool) -> Any:
        starts = {"cu_seqlens_q": packed.query_starts, "cu_seqlens_kv": packed.key_starts}
        arguments = self._settings | states | starts | {f"{name}_padded": values for name, values in starts.items()}
        arguments |= {"attn_mask_type": "padding_causal" if causal else "padding", "fake_dtype": states["q"].dtype}
        arguments |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), packed.longest, strict=True))
        known = inspect.signature(function).parameters
        # Any other name that a release does not know is an error: a mask left out would be wrong numbers.
        for name in SOME_RELEASES - known.keys():
            arguments.pop(name, None)
        return function(**arguments)
