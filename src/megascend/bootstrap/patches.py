"""Faults of megatron-core that give wrong numbers without an error, mended on every platform, whoever imports it.

Each is shown to exist in ``tests/test_upstream_faults.py``, which fails when upstream has mended it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend.bootstrap.after_import import after_import
from megascend.changes import patch

if TYPE_CHECKING:
    from torch import Tensor

MAPPINGS = "megatron.core.tensor_parallel.mappings"


def apply_on_import() -> None:
    """Mend each as soon as its module is imported; at once, if it has been."""
    after_import(MAPPINGS, mend_reduce)


def mend_reduce() -> None:
    """Idempotent."""
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
