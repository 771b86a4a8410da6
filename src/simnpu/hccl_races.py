"""Collectives in strict mode: their group's queue waits for the current stream, and ``wait()`` makes a stream wait for it.

Source: torch_npu (Ascend/pytorch 9e73e708), ProcessGroupHCCL.cpp (syncStreams, synchronizeInternal).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup, Work

from simnpu.memory import cpu_view
from simnpu.order import ORDER, Order, Queue, current
from simnpu.races import Launch, poison_

_alive: dict[int, OrderedWork] = {}  # until somebody waits: C++ keeps no Python object


class OrderedWork(Work):
    """The handle of a collective. Asking for its future counts as waiting, since PyTorch waits for that in C++."""

    def __init__(self, work: Work, order: Order, queue: Queue, launch: Launch, is_barrier: bool) -> None:
        super().__init__()
        self.work, self.order, self.queue, self.launch, self.is_barrier = work, order, queue, launch, is_barrier
        self.clock = order.now(queue)
        _alive[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        _alive.pop(id(self), None)
        outcome = self.work.wait(timeout) if timeout else self.work.wait()
        self.launch.poison_overwritten()
        self.order.wait(current(self.queue[0]), self.clock)
        if self.is_barrier:
            self.order.host_waits_for_device(self.queue[0])
        return outcome

    def get_future(self) -> Any:
        _alive.pop(id(self), None)
        self.order.wait(current(self.queue[0]), self.clock)
        return self.work.get_future()

    def is_completed(self) -> bool:
        if completed := self.work.is_completed():
            self.order.host_waits(self.clock)
        return completed

    def result(self) -> Any:
        return self.work.result()


def collective(
    name: str, group: ProcessGroup, index: int, tensors: tuple[Any, ...], root: Any, run: Callable[..., Work]
) -> Work:
    """Run a collective on the device ``index``. Its first tensors are written, unless this rank sends them."""
    if ORDER is None:
        return run(*tensors)
    queue = (index, f"hccl group {group.group_name}")
    ORDER.wait(queue, ORDER.now(current(index)))
    launch = Launch(ORDER, f"hccl::{name.strip('_')}", queue)
    sends = name == "send" or (name == "broadcast_" and root == group.rank())
    tensors = tuple(launch.argument(value, writes=i == 0 and not sends) for i, value in enumerate(tensors))
    for tensor in launch.overwritten:
        poison_(cpu_view(tensor))  # the others may get it
    work = run(*tensors)
    for access in launch.accesses:
        access.finish, access.results = work.wait, launch.results
    return OrderedWork(work, ORDER, queue, launch, name == "barrier")
