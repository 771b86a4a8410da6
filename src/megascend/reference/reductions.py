"""Reductions that read a tensor once: the 2-norm with float32 accuracy, NaN, and values beyond the range of fp16.

fp16 ends at 65,504, far below the range of fp32 and bf16; a value beyond it must not become infinite without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megascend.errors import CheckpointError

ROW = 1 << 12
"""Elements whose norm a CPU computes in one reduction."""


def square_sum(vector: Tensor) -> Tensor:
    """Return the squared 2-norm of all elements of a float32 tensor, a float32 scalar on its device."""
    if vector.device.type == "cuda":
        return torch.linalg.vector_norm(vector, dtype=torch.float32).square()
    # On a CPU vector_norm sums sequentially in a few registers. For 17 million elements the fourth digit is wrong, for 155
    # million (an embedding) the error is 0.9 % (torch 2.13). So it is computed in rows.
    flat = vector.reshape(-1)
    end = len(flat) // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:end].view(-1, ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[end:], dtype=torch.float32)
    return norms.square().sum() + rest.square()


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all elements of all tensors, a float32 scalar; at least one tensor, all on one device."""
    return torch.stack([square_sum(tensor) for tensor in tensors]).sum().sqrt()


@torch.no_grad()
def names_with_nan(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of floating-point tensors, all on one device, that contain NaN; synchronizes once."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not floats:
        return []
    # The maximum is NaN if any element is. It reads memory once and writes nothing: on a CPU it takes a tenth of the time of
    # isnan().any(), and a twenty-fifth of that of counting.
    flags = torch.stack([tensor.amax().isnan() for tensor in floats.values()]).tolist()
    return [name for name, flag in zip(floats, flags, strict=True) if flag]


LARGEST = 65504.0


def out_of_range(name: str, tensor: Tensor, dtype: torch.dtype = torch.float16) -> str | None:
    """Return a message about a value of ``tensor`` beyond fp16, if ``dtype`` is fp16, which synchronizes; else None."""
    if dtype != torch.float16 or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = (float(value) for value in tensor.detach().aminmax())
    largest = high if high >= -low else low
    if abs(largest) < LARGEST + 16:  # halfway to the next step: from there on fp16 rounds up to infinity
        return None
    remedy = "set precision: bf16 or fp32 (megascend export --dtype bf16)"
    return f"{name} holds {largest:g}, and fp16 ends at {LARGEST:,.0f}: {remedy}"


def to_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``tensor``; raise CheckpointError if a value is beyond the range of fp16."""
    if problem := out_of_range(name, tensor, dtype):
        raise CheckpointError(problem)
    return tensor.to(dtype)
