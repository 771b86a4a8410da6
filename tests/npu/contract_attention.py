"""Facts about attention: its class and its calls of the fused kernel. Part of ``contract_report.py``; see there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

TE = "megatron.core.extensions.transformer_engine"
LENGTH, HEADS, HEAD_SIZE = 8, 2, 16


def classes(adaptor: Any) -> dict[str, str]:
    """Return the class behind TEDotProductAttention by context parallel size, algorithm and level; restore the patches."""
    extensions = import_module(TE)
    kinds = {}
    for size, algorithm, level in (
        (1, "megatron_cp_algo", 0),
        (2, "megatron_cp_algo", 2),
        (2, "kvallgather_cp_algo", 2),
        (2, "megatron_cp_algo", 0),
        (1, "megatron_cp_algo", 2),
    ):
        arguments = {"context_parallel_size": size, "context_parallel_algo": algorithm, "optimization_level": level}
        adaptor.repatch(arguments)
        kind = extensions.TEDotProductAttention
        kinds[f"size {size}, {algorithm}, level {level}"] = f"{kind.__module__}.{kind.__qualname__}"
    adaptor.repatch({"context_parallel_size": 1, "context_parallel_algo": "megatron_cp_algo", "optimization_level": 0})
    return kinds


def calls() -> dict[str, Any]:
    """Return the kernel's arguments by the mask that the model passes. The kernel itself is not run."""
    config = _config()
    dense = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="npu")
    recorded_calls = {
        "no mask": _recorded(config, None),
        "dense mask": _recorded(config, dense),
        "packed": _recorded(config, None, packed=[0, 5, LENGTH]),
    }
    config.attention_mask_type = "general"
    recorded_calls["dense mask, attention_mask_type general"] = _recorded(config, dense)
    return recorded_calls


def _config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=HEADS * HEAD_SIZE, num_attention_heads=HEADS, attention_dropout=0.25
    )


def _recorded(config: Any, mask: torch.Tensor | None, packed: list[int] | None = None) -> dict[str, Any]:
    """Record the call of ``torch_npu.npu_fusion_attention`` in one forward pass of TEDotProductAttention."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    attention = import_module(TE).TEDotProductAttention(config, 1, AttnMaskType.causal, "self")
    shape = (LENGTH, HEADS, HEAD_SIZE) if packed else (LENGTH, 1, HEADS, HEAD_SIZE)
    query, key, value = (torch.zeros(shape, device="npu") for _ in range(3))
    lengths = torch.tensor(packed, dtype=torch.int32, device="npu") if packed else None
    parameters = packed and PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    observed: list[dict[str, Any]] = []

    def recording(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        observed.append({"shape": list(args[0].shape), "heads": args[3], "layout": args[4], **kwargs})
        return [args[0]]

    torch_npu: Any = import_module("torch_npu")
    kernel: Callable[..., Any] = torch_npu.npu_fusion_attention
    torch_npu.npu_fusion_attention = recording
    try:
        attention.eval()(query, key, value, mask, AttnMaskType.causal, packed_seq_params=parameters or None)
    finally:
        torch_npu.npu_fusion_attention = kernel
    (call,) = observed
    mask_argument = call.pop("atten_mask")
    upper = torch.ones(mask_argument.shape, dtype=torch.bool).triu(diagonal=1)
    return call | {
        "mask": [str(mask_argument.dtype), *mask_argument.shape],
        "mask_is_the_models": mask_argument is mask,
        "mask_is_a_triangle": torch.equal(mask_argument.cpu(), upper),
    }
