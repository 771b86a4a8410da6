"""The 2-norm of a vector of any length, to float32's accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 1 << 12
"""Elements that a CPU adds up in one go."""


def square_sum(vector: Tensor) -> Tensor:
    """The squared 2-norm of all elements of a float32 tensor, which is read once; a float32 scalar on its device.

    On a CPU ``torch.linalg.vector_norm`` adds up one element after the other in each of a few registers. Of 17 million it is
    wrong in the fourth digit, and of 155 million (an embedding) by 0.9 % (torch 2.13), so it is taken row by row there.
    """
    if vector.is_cuda:
        return torch.linalg.vector_norm(vector, dtype=torch.float32).square()
    flat = vector.reshape(-1)
    whole = len(flat) // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return norms.square().sum() + rest.square()


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all elements of all tensors of one device, a float32 scalar; at least one tensor."""
    return torch.stack([square_sum(tensor) for tensor in tensors]).sum().sqrt()
