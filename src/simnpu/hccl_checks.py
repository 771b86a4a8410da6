"""What HCCL takes, in torch_npu's words, and how its tensors and reductions are put to Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from simnpu.memory import cpu_view

REDUCIBLE = {
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.bfloat16,
}
"""Types that HCCL reduces on Atlas A2 and A3 (checkSupportedDataType); bool and uint8 are reduced as int32."""

NAMES = {
    torch.float64: "at::kDouble",
    torch.uint16: "at::ScalarType::UInt16",
    torch.uint32: "at::ScalarType::UInt32",
    torch.uint64: "at::ScalarType::UInt64",
    torch.float8_e4m3fn: "at::ScalarType::Float8_e4m3fn",
    torch.float8_e5m2: "at::ScalarType::Float8_e5m2",
}
MOVABLE = {*REDUCIBLE, *NAMES, torch.bool, torch.uint8}

AS_INT32 = (torch.bool, torch.uint8, torch.int16)  # int16: Gloo has no sum of it
NO_PRODUCT = (torch.bfloat16, torch.int16)
UNSUPPORTED_WORLDS = (3, 5, 6, 7)
WORLD_LIMITED = {
    "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "_allgather_base_",
    "allgather_into_tensor_coalesced_",
}  # fmt: skip
"""Collectives that Atlas A2 does not have for these numbers of ranks (torch_npu's list of PyTorch's APIs, August 2026)."""
UNSUPPORTED_OPS = {ReduceOp.BAND: "BAND", ReduceOp.BOR: "BOR", ReduceOp.BXOR: "BXOR"}


def reduction(boxed: Any) -> Any:
    op = ReduceOp.RedOpType(boxed.op())
    if op == ReduceOp.PREMUL_SUM:
        raise NotImplementedError("the simulated HCCL does not carry ReduceOp.PREMUL_SUM: scale, then use SUM")
    return op


def only(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise RuntimeError("Tensor list mustn't be larger than the number of available NPUs")
    return items[0]


def check_world(name: str, size: int) -> None:
    if name in WORLD_LIMITED and size in UNSUPPORTED_WORLDS:
        raise RuntimeError(
            f"HCCL {name.strip('_')} does not support a world size of {size} on Atlas A2: not 3, 5, 6, 7"
        )


def check(tensor: Tensor) -> None:
    if tensor.device.type != "npu" or tensor.layout != torch.strided:
        raise RuntimeError("Tensors must be NPU and dense")
    if not tensor.is_contiguous():
        raise RuntimeError("Tensors must be contiguous")
    if tensor.dtype not in MOVABLE:
        raise RuntimeError("Unsupported data type for HCCL process group")


def check_reducible(tensor: Tensor, op: Any, name: str) -> None:
    check(tensor)
    if tensor.dtype in NAMES:
        raise RuntimeError(f"HCCL {name}: Unsupported data type {NAMES[tensor.dtype]}")
    if op == ReduceOp.PRODUCT and tensor.dtype in NO_PRODUCT:
        raise RuntimeError(f"HCCL {name}: ReduceOp.PRODUCT does not support {tensor.dtype} on Atlas A2")
    if op in UNSUPPORTED_OPS:
        raise RuntimeError(f"Cannot use ReduceOp.{UNSUPPORTED_OPS[op]} with HCCL")


def for_reduction(tensor: Tensor, copy: bool) -> Tensor:
    if tensor.dtype in AS_INT32:
        return tensor.to(torch.int32)
    return tensor.clone() if copy else tensor


def gloo_op(op: Any, tensor: Tensor) -> Any:
    """AVG is a sum divided afterwards, as in torch_npu; a sum of booleans is their "or"."""
    if op in (ReduceOp.AVG, ReduceOp.SUM) and tensor.dtype == torch.bool:
        return ReduceOp.MAX
    return ReduceOp.SUM if op == ReduceOp.AVG else op


def averaged(result: Tensor, op: Any, size: int) -> Tensor:
    if op != ReduceOp.AVG:
        return result
    return result / size if result.is_floating_point() else result // size


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of an npu tensor, as a flat CPU tensor over its memory."""
    check(tensor)
    return cpu_view(tensor).view(-1).view(torch.uint8)


def byte_splits(tensor: Tensor, splits: list[int], size: int) -> list[int]:
    """Sizes along dimension 0 as sizes in bytes; none given means equal parts."""
    row = tensor.element_size() * (tensor.numel() // len(tensor) if len(tensor) else 0)
    if splits:
        if len(splits) != size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(splits) != len(tensor):
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return [split * row for split in splits]
    if len(tensor) % size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    return [len(tensor) // size * row] * size


def timed(options: Any, milliseconds: int) -> Any:
    if milliseconds >= 0:
        options.timeout = timedelta(milliseconds=milliseconds)
    return options
