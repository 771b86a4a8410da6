"""Reductions over an hccl group, by Gloo, in the tensors' own precision. Arguments are the c10d operators'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from simnpu.hccl_checks import (
    averaged,
    check,
    check_reducible,
    for_reduction,
    gloo_op,
    only,
    timed,
)
from simnpu.hccl_registry import after, gloo, kernel
from simnpu.memory import cpu_view

_c10d: Any = torch._C._distributed_c10d  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs


@kernel(returns=0)
def allreduce_(
    tensors: list[Tensor], group: ProcessGroup, op: Any, sparse: Any, async_op: bool = True, timeout: int = -1
) -> Work:
    return _all_reduce(only(tensors), group, op, timeout, "allreduce")


@kernel()
def allreduce_coalesced_(
    tensors: list[Tensor], group: ProcessGroup, op: Any, async_op: bool = True, timeout: int = -1
) -> Work:
    return after([_all_reduce(tensor, group, op, timeout, "allreduce_coalesced") for tensor in tensors])


@kernel()
def reduce_(
    tensors: list[Tensor],
    group: ProcessGroup,
    op: Any,
    root_rank: int,
    root_tensor: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Work:
    tensor = only(tensors)
    check_reducible(tensor, op, "reduce")
    # A copy, so that only the root's tensor changes, whatever Gloo leaves in those of the other ranks.
    target, result = cpu_view(tensor), for_reduction(cpu_view(tensor), copy=True)
    options = _c10d.ReduceOptions()
    options.reduceOp, options.rootRank = gloo_op(op, tensor), root_rank
    work = gloo(group).reduce([result], timed(options, timeout))

    def finish() -> None:
        if group.rank() == root_rank:
            target.copy_(averaged(result, op, group.size()))

    return after([work], finish)


@kernel(returns=0)
def reduce_scatter_(
    outputs: list[Tensor],
    inputs: list[list[Tensor]],
    group: ProcessGroup,
    op: Any,
    async_op: bool = True,
    timeout: int = -1,
) -> Work:
    output, parts = only(outputs), only(inputs)
    if len(parts) != group.size() or parts[group.rank()].shape != output.shape:
        raise RuntimeError(
            f"reduce_scatter over {group.size()} ranks got {len(parts)} inputs, and this rank's, of shape "
            f"{tuple(parts[group.rank()].shape)}, for an output of shape {tuple(output.shape)}"
        )
    source = torch.cat([cpu_view(part).reshape(-1) for part in parts])
    begin = sum(part.numel() for part in parts[: group.rank()])
    return _reduce_scatter(output, source, begin, group, op, timeout, "reduce_scatter")


@kernel(returns=0)
def _reduce_scatter_base_(
    output: Tensor, input_: Tensor, group: ProcessGroup, op: Any, async_op: bool = True, timeout: int = -1
) -> Work:
    return _reduce_scatter_single(output, input_, group, op, timeout, "_reduce_scatter_base")


@kernel()
def reduce_scatter_tensor_coalesced_(
    outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, op: Any, async_op: bool = True, timeout: int = -1
) -> Work:
    name = "reduce_scatter_tensor_coalesced"
    pairs = zip(outputs, inputs, strict=True)
    return after([_reduce_scatter_single(o, i, group, op, timeout, name) for o, i in pairs])


def _all_reduce(tensor: Tensor, group: ProcessGroup, op: Any, timeout: int, name: str) -> Work:
    check_reducible(tensor, op, name)
    target = cpu_view(tensor)
    result = for_reduction(target, copy=False)
    options = _c10d.AllreduceOptions()
    options.reduceOp = gloo_op(op, tensor)
    work = gloo(group).allreduce([result], timed(options, timeout))
    # Gloo reduces in place; only an average is still to be divided, since Gloo has sums alone.
    if result is target and op != ReduceOp.AVG:
        return work

    def finish() -> None:
        target.copy_(averaged(result, op, group.size()))

    return after([work], finish)


def _reduce_scatter_single(
    output: Tensor, input_: Tensor, group: ProcessGroup, op: Any, timeout: int, name: str
) -> Work:
    if output.dtype != input_.dtype:
        raise RuntimeError("input tensor must be the same type as the output tensor.")
    if input_.numel() != output.numel() * group.size():
        raise RuntimeError("input tensor must be the same size as output size times world size")
    check(input_)
    source = cpu_view(input_).reshape(-1).clone()
    return _reduce_scatter(output, source, output.numel() * group.rank(), group, op, timeout, name)


def _reduce_scatter(
    output: Tensor, source: Tensor, begin: int, group: ProcessGroup, op: Any, timeout: int, name: str
) -> Work:
    """All-reduce ``source`` in place and keep this rank's part.

    More traffic than needed, and in return the sums are bit for bit those of an all-reduce, whatever the sharding.
    """
    check_reducible(output, op, name)
    target = cpu_view(output)
    result = for_reduction(source, copy=False)
    options = _c10d.AllreduceOptions()
    options.reduceOp = gloo_op(op, output)
    work = gloo(group).allreduce([result], timed(options, timeout))

    def finish() -> None:
        part = averaged(result[begin : begin + target.numel()], op, group.size())
        target.copy_(part.view(target.shape))

    return after([work], finish)
