"""``torch_npu.distributed``: the collectives with parts of different sizes, and what programs ask of HCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

from simnpu.errors import missing

__all__ = [
    "all_gather_into_tensor_uneven",
    "is_available",
    "is_hccl_available",
    "reduce_scatter_tensor_uneven",
    "reinit_process_group",
]


def is_available() -> bool:
    return True


def is_hccl_available() -> bool:
    """Check whether ``hccl`` is available; it is carried by Gloo here."""
    return True


def reinit_process_group(group: ProcessGroup | None = None, rebuild_link: bool = True) -> ProcessGroup | None:
    """Rebuild nothing, as no device fails here; return the group, or None without ``rebuild_link``."""
    return (group or distributed_c10d._get_default_group()) if rebuild_link else None


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Any], then: Any = None) -> None:
        self.works, self.then = works, then

    def wait(self) -> bool:
        for work in self.works:
            work.wait()
        if self.then is not None:
            self.then()
        return True


def parts_of(
    joint: Tensor, part: Tensor, split_sizes: Sequence[int] | None, group: ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Split the rows of ``joint`` by rank, as many as given or else equally many; ``part`` is to fit this rank's."""
    world, rank, total = dist.get_world_size(group), dist.get_rank(group), len(joint)
    sizes = list(split_sizes) if split_sizes else [total // world] * world
    if len(sizes) != world or sum(sizes) != total:
        raise ValueError(f"split sizes {sizes} must be {world} numbers that sum to {total} rows")
    if len(part) != sizes[rank]:
        raise ValueError(f"rank {rank} has a part of {len(part)} rows, but its split size is {sizes[rank]}")
    return joint.split(sizes)


def all_gather_into_tensor_uneven(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Works | None:
    """``output`` is the rows of all ranks, of which each has as many as ``output_split_sizes`` says."""
    parts = parts_of(output, input, output_split_sizes, group)
    with torch.no_grad():
        parts[dist.get_rank(group)].copy_(input)
    # One broadcast a rank: Gloo gathers equal parts only.
    works = [
        dist.broadcast(part, group_src=source, group=group, async_op=True)
        for source, part in enumerate(parts)
        if len(part)
    ]
    return finished(Works(works), async_op)


def reduce_scatter_tensor_uneven(
    output: Tensor,
    input: Tensor,
    input_split_sizes: Sequence[int] | None = None,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Works | None:
    """``output`` is this rank's rows of the reduced ``input``, as many as ``input_split_sizes`` says."""
    # An all-reduce, since Gloo scatters equal parts only; of a copy, as the caller's input must not change.
    total = input.detach().clone()
    shard = parts_of(total, output, input_split_sizes, group)[dist.get_rank(group)]
    work = dist.all_reduce(total, op=op, group=group, async_op=True)

    def take() -> None:
        with torch.no_grad():
            output.copy_(shard)

    return finished(Works([work], take), async_op)


def finished(works: Works, async_op: bool) -> Works | None:
    """Return the works for the caller to wait for, or None when they are done."""
    if async_op:
        return works
    works.wait()
    return None


def __getattr__(name: str) -> object:
    raise missing(name, "torch_npu.distributed")
