"""Collectives and point-to-point operations that only move data: Gloo moves their bytes, whatever the dtype.

Arguments are the c10d operators'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from simnpu.hccl_checks import (
    byte_splits,
    bytes_of,
    check,
    only,
    timed,
)
from simnpu.hccl_registry import after, gloo, kernel, pairs, point_to_point
from simnpu.memory import cpu_view

_c10d: Any = torch._C._distributed_c10d  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs


@kernel(returns=0)
def broadcast_(
    tensors: list[Tensor],
    group: ProcessGroup,
    root_rank: int,
    root_tensor: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Work:
    options = _c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = root_rank, root_tensor
    return gloo(group).broadcast([bytes_of(only(tensors))], timed(options, timeout))


@kernel(returns=0)
def allgather_(
    outputs: list[list[Tensor]], inputs: list[Tensor], group: ProcessGroup, async_op: bool = True, timeout: int = -1
) -> Work:
    return _all_gather(only(outputs), only(inputs), group, timeout)


@kernel()
def allgather_coalesced_(
    outputs: list[list[Tensor]], inputs: list[Tensor], group: ProcessGroup, async_op: bool = True
) -> Work:
    return after([_all_gather(o, i, group, -1) for o, i in zip(outputs, inputs, strict=True)])


@kernel(returns=0)
def _allgather_base_(
    output: Tensor, input_: Tensor, group: ProcessGroup, async_op: bool = True, timeout: int = -1
) -> Work:
    return _all_gather_single(output, input_, group, timeout)


@kernel()
def allgather_into_tensor_coalesced_(
    outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, async_op: bool = True
) -> Work:
    return after([_all_gather_single(o, i, group, -1) for o, i in zip(outputs, inputs, strict=True)])


@kernel()
def alltoall_base_(
    output: Tensor,
    input_: Tensor,
    group: ProcessGroup,
    output_splits: list[int],
    input_splits: list[int],
    async_op: bool = True,
    timeout: int = -1,
) -> Work:
    if output.dtype != input_.dtype or (not output_splits and not input_splits and output.numel() != input_.numel()):
        raise RuntimeError("Tensors are not equal in size or data type")
    if not output.dim() or not input_.dim():
        raise RuntimeError("Scalar tensors (0-dim tensors) are not supported in alltoall.")
    return gloo(group).alltoall_base(
        bytes_of(output),
        bytes_of(input_),
        byte_splits(output, output_splits, group.size()),
        byte_splits(input_, input_splits, group.size()),
        timed(_c10d.AllToAllOptions(), timeout),
    )


@kernel(returns=0)
def alltoall_(
    outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, async_op: bool = True, timeout: int = -1
) -> Work:
    if len(outputs) != group.size():
        raise RuntimeError("the size of output_tensors and worldsize must equal")
    if len(inputs) != len(outputs):
        raise RuntimeError("the size of input_tensors and output_tensors must equal")
    # Gloo has the exchange for one tensor only: the parts are joined before it and copied out of the result after it.
    sources, targets = [bytes_of(t) for t in inputs], [bytes_of(t) for t in outputs]
    received = torch.empty(sum(map(len, targets)), dtype=torch.uint8)
    sizes = [len(t) for t in targets]
    work = gloo(group).alltoall_base(
        received, torch.cat(sources), sizes, [len(s) for s in sources], timed(_c10d.AllToAllOptions(), timeout)
    )

    def finish() -> None:
        for target, part in zip(targets, received.split(sizes), strict=True):
            target.copy_(part)

    return after([work], finish)


@kernel()
def gather_(
    outputs: list[list[Tensor]],
    inputs: list[Tensor],
    group: ProcessGroup,
    root_rank: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Work:
    options = _c10d.GatherOptions()
    options.rootRank = root_rank
    targets = [[bytes_of(tensor) for tensor in part] for part in outputs]
    return gloo(group).gather(targets, [bytes_of(only(inputs))], timed(options, timeout))


@kernel(returns=0)
def scatter_(
    outputs: list[Tensor],
    inputs: list[list[Tensor]],
    group: ProcessGroup,
    root_rank: int,
    async_op: bool = True,
    timeout: int = -1,
) -> Work:
    options = _c10d.ScatterOptions()
    options.rootRank = root_rank
    sources = [[bytes_of(tensor) for tensor in part] for part in inputs]
    return gloo(group).scatter([bytes_of(only(outputs))], sources, timed(options, timeout))


@kernel()
def send(tensors: list[Tensor], group: ProcessGroup, dst: int, tag: int) -> Work:
    data = bytes_of(only(tensors))
    return point_to_point(pairs(group).send([data], dst, tag), data)


@kernel()
def recv_(tensors: list[Tensor], group: ProcessGroup, src: int, tag: int) -> Work:
    data = bytes_of(only(tensors))
    return point_to_point(pairs(group).recv([data], src, tag), data)


@kernel()
def recv_any_source_(tensors: list[Tensor], group: ProcessGroup, tag: int) -> Work:
    raise RuntimeError("ProcessGroupHCCL does not support recv")


@kernel()
def barrier(
    tensor: Tensor, group: ProcessGroup, device_ids: list[int], async_op: bool = True, timeout: int = -1
) -> Work:
    return gloo(group).barrier(timed(_c10d.BarrierOptions(), timeout))


def _all_gather(outputs: list[Tensor], input_: Tensor, group: ProcessGroup, timeout: int) -> Work:
    """Outputs may differ in size: then all are padded to the longest, since Gloo gathers equal parts only."""
    check(input_)
    if len(outputs) != group.size() or outputs[group.rank()].shape != input_.shape:
        raise RuntimeError(
            f"all_gather over {group.size()} ranks got {len(outputs)} outputs, and this rank's, of shape "
            f"{tuple(outputs[group.rank()].shape)}, for an input of shape {tuple(input_.shape)}"
        )
    targets = [cpu_view(output) for output in outputs]
    longest = max(target.numel() for target in targets)
    source = torch.zeros(longest, dtype=input_.dtype)
    source[: input_.numel()] = cpu_view(input_).reshape(-1)
    received = [torch.empty_like(source) for _ in targets]
    options = timed(_c10d.AllgatherOptions(), timeout)
    work = gloo(group).allgather([[r.view(torch.uint8) for r in received]], [source.view(torch.uint8)], options)

    def finish() -> None:
        for target, part in zip(targets, received, strict=True):
            target.copy_(part[: target.numel()].view(target.shape))

    return after([work], finish)


def _all_gather_single(output: Tensor, input_: Tensor, group: ProcessGroup, timeout: int) -> Work:
    if output.dtype != input_.dtype:
        raise RuntimeError("output tensor must have the same type as input tensor")
    if output.numel() != input_.numel() * group.size():
        raise RuntimeError("output tensor size must be equal to world_size times input tensor size")
    targets = list(bytes_of(output).chunk(group.size())) if output.numel() else [bytes_of(output)] * group.size()
    return gloo(group).allgather([targets], [bytes_of(input_)], timed(_c10d.AllgatherOptions(), timeout))
