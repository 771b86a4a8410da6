"""Faults of megatron-core that give wrong numbers without an error, mended right after its import, on every platform.

Each is shown to exist in ``tests/test_upstream_faults.py``, which fails when upstream has mended it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend.changes import patch

if TYPE_CHECKING:
    from torch import Tensor

MAPPINGS = "megatron.core.tensor_parallel.mappings"


def apply() -> None:
    """Mend them. Call after megatron.core is imported; idempotent."""
    mappings = import_module(MAPPINGS)
    if mappings._reduce is not reduce:
        patch(mappings, "_reduce", reduce, "also reduces tensors that are not contiguous")


def reduce(input_: Tensor, group: Any) -> Tensor:
    """Sum of ``input_`` over the tensor parallel group.

    Megatron's own reduces a contiguous copy and returns the tensor it was given: one that is not contiguous (the gradient
    of hidden states of several samples, [batch, sequence] seen as [sequence, batch]) comes back as this rank's part.
    """
    import torch.distributed as dist

    if group.size() == 1:
        return input_
    total = input_.contiguous()
    dist.all_reduce(total, group=group)
    return total
