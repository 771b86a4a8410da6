"""The old typed constructors (``torch.npu.FloatTensor``), which Megatron and MindSpeed still call and compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DTYPES = {
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
}


class TensorTypeMeta(type):
    """``isinstance(tensor, torch.npu.FloatTensor)`` looks at device and dtype, as it does for CUDA's types."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.device.type == "npu" and instance.dtype == cls.dtype


class TensorType(metaclass=TensorTypeMeta):
    """A constructor for NPU tensors of one dtype, from sizes (also as ``size=``) or from data."""

    dtype = torch.float32

    def __new__(cls, *args: Any, size: Sequence[int] | None = None) -> torch.Tensor:  # type: ignore[misc]
        if size is not None:
            return torch.empty(size, dtype=cls.dtype, device="npu")
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype, device="npu")
        return torch.empty(*args or (0,), dtype=cls.dtype, device="npu")


TYPES: dict[str, type] = {
    name: type(name, (TensorType,), {"dtype": dtype, "__module__": "torch.npu", "__qualname__": name})
    for name, dtype in DTYPES.items()
}
