"""Uneven splits over Gloo, which its collectives lack: the MoE dispatcher needs them when experts are tensor parallel.

With expert tensor parallelism inside expert parallelism the ranks of an expert's group hold different numbers of tokens.
NCCL and HCCL gather and reduce-scatter such lists; Gloo refuses them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.errors import ImportOrderError

MAPPINGS = "megatron.core.tensor_parallel.mappings"


def install() -> list[str]:
    """Give megatron-core's two region functions an uneven path of their own. Idempotent; call after its import."""
    if MAPPINGS not in sys.modules:
        raise ImportOrderError(f"import megatron.core first; not imported: {MAPPINGS}")
    mappings: Any = sys.modules[MAPPINGS]
    changes = []
    for name, uneven in (("_gather_along_first_dim", gather), ("_reduce_scatter_along_first_dim", reduce_scatter)):
        original = getattr(mappings, name)
        if not hasattr(original, "__megascend__"):
            setattr(mappings, name, _with_uneven_path(original, uneven))
            changes.append(f"{MAPPINGS}.{name}: takes uneven splits over Gloo")
    return changes


def _with_uneven_path(original: Callable[..., Tensor], uneven: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(input_: Tensor, group: Any, split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if split_sizes is None or group.size() == 1:
            return original(input_, group, split_sizes, use_global_buffer)
        return uneven(input_, group, [int(size) for size in split_sizes])

    function.__megascend__ = True  # type: ignore[attr-defined]
    return function


def gather(tensor: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """Concatenation over the group of every rank's ``tensor`` [sizes[rank], ...]: padded to one length, gathered, cut."""
    longest = max(sizes)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter(tensor: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """This rank's [sizes[rank], ...] part of the sum over the group of ``tensor`` [sum(sizes), ...]."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
