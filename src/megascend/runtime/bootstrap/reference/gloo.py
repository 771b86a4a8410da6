"""Gloo in place of NCCL on a CPU: process groups, tensors that are not contiguous, and uneven splits."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megascend.changes import patch
from megascend.errors import ImportOrderError, PlatformError

BACKEND_POSITIONS = {"init_process_group": 0, "new_group": 2}
"""Functions that create groups, and the position of their argument ``backend``."""
OUTPUT_ARGUMENTS = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "scatter": "tensor",
    "reduce_scatter": "output",
}
"""Collectives that Gloo computes wrongly for tensors that are not contiguous, and the argument that each writes to.

Gloo uses the memory from a tensor's start on and ignores its strides, without an error (torch 2.13); all other collectives are
correct, or refuse such tensors. NCCL refuses them too, except in lists: on CUDA a program's copy to the device makes their
tensors contiguous, while here they stay views."""
READ_LISTS = {"scatter": "scatter_list", "reduce_scatter": "input_list"}
"""Arguments of these collectives that are lists of tensors and only read."""
MAPPINGS = "megatron.core.tensor_parallel.mappings"


def install() -> list[str]:
    """Create groups of backend NCCL with Gloo, and guard :data:`OUTPUT_ARGUMENTS`. Idempotent.

    ``torch.distributed.get_backend()`` then returns the actual backend, "gloo".
    """
    _replace(BACKEND_POSITIONS, on_gloo, "backend nccl means gloo")
    _replace(
        OUTPUT_ARGUMENTS, _contiguous, "refuses to write to a tensor that is not contiguous, and reads such ones right"
    )
    return []


def _replace(names: dict[str, Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]], reason: str) -> None:
    for name in names:
        original = getattr(dist, name)
        if not hasattr(original, "__megascend__"):
            function = wrap(original)
            function.__megascend__ = True  # type: ignore[attr-defined]
            # Both: torch's own modules call the functions of distributed_c10d, programs those of torch.distributed.
            for owner in (dist, distributed_c10d):
                patch(owner, name, function, reason)


def on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that creates groups: backend "nccl", with or without a device type, becomes "gloo"."""
    position = BACKEND_POSITIONS[original.__name__]

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        backend = args[position] if len(args) > position else kwargs.get("backend")
        if isinstance(backend, str) and "nccl" in backend.lower():
            if len(args) > position:
                args = (*args[:position], "gloo", *args[position + 1 :])
            else:
                kwargs["backend"] = "gloo"
            kwargs.pop("pg_options", None)  # NCCL's options
        # device_id binds a group to a GPU and initialises NCCL eagerly.
        if getattr(kwargs.get("device_id"), "type", None) == "cuda":
            kwargs.pop("device_id")
        return original(*args, **kwargs)

    return function


def _contiguous(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__
    output, read = OUTPUT_ARGUMENTS[name], READ_LISTS.get(name, "")
    positions = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        position = positions.index(output)
        tensor = args[position] if len(args) > position else kwargs.get(output)
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            raise PlatformError(
                f"torch.distributed.{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                "contiguous: pass tensor.contiguous(), and copy back"
            )
        if read and len(args) > (position := positions.index(read)):
            args = (*args[:position], _copies(args[position]), *args[position + 1 :])
        elif read in kwargs:
            kwargs[read] = _copies(kwargs[read])
        return original(*args, **kwargs)

    return function


def _copies(tensors: list[Tensor] | None) -> list[Tensor] | None:
    # Gloo reads the memory of a tensor, not its strides.
    return None if tensors is None else [tensor.contiguous() for tensor in tensors]


def add_uneven_splits() -> list[str]:
    """Add a path for uneven splits, which Gloo refuses, to megatron-core's two region functions. Call after its import.

    With expert tensor parallelism inside expert parallelism the ranks of an expert's group hold different numbers of tokens;
    NCCL and HCCL gather and reduce-scatter such lists. Idempotent.
    """
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
    """Concatenate every rank's ``tensor`` [sizes[rank], ...] over the group: pad to one length, gather, cut."""
    # Gloo's all_gather takes tensors of one shape only.
    longest = max(sizes)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter(tensor: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """Return this rank's [sizes[rank], ...] part of the sum over the group of ``tensor`` [sum(sizes), ...]."""
    # Gloo has no reduce-scatter of uneven parts. A copy, because the sum replaces the tensor that is passed.
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
