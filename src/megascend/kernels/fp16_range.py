"""fp16 ends at 65,504, far below what fp32 and bf16 hold: a number beyond it must not become infinite without a word."""

from __future__ import annotations

import torch
from torch import Tensor

from megascend.errors import CheckpointError

LARGEST = 65504.0


def out_of_range(name: str, tensor: Tensor, dtype: torch.dtype = torch.float16) -> str | None:
    """Return a sentence about the first number of ``tensor`` that ``dtype`` cannot hold, None if there is none.

    Reads the tensor once and waits for its device, for fp16 only.

    Args:
        name: of the tensor, for the sentence.
        dtype: that the tensor has or is about to get.
    """
    if dtype != torch.float16 or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = (float(value) for value in tensor.detach().aminmax())
    largest = high if high >= -low else low
    if abs(largest) < LARGEST + 16:  # from there on fp16 rounds up to infinity
        return None
    remedy = "set precision: bf16 or fp32 (megascend export --dtype bf16)"
    return f"{name} holds {largest:g}, and fp16 ends at {LARGEST:,.0f}: {remedy}"


def to_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``tensor``.

    Raises:
        CheckpointError: a number is beyond fp16's range.
    """
    if problem := out_of_range(name, tensor, dtype):
        raise CheckpointError(problem)
    return tensor.to(dtype)
