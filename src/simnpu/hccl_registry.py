"""The kernels of the c10d operators for npu tensors, as the modules that write them enter them here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from simnpu.hccl_checks import check_world, reduction
from simnpu.hccl_races import collective
from simnpu.visible import index_of

KERNELS: dict[str, Callable[..., Any]] = {}
_coalescing: dict[str, list[Work]] = {}  # by group name: works since start_coalescing


def start_coalescing(group: ProcessGroup) -> None:
    _coalescing[group.group_name] = []


def end_coalescing(group: ProcessGroup) -> list[Work]:
    return _coalescing.pop(group.group_name)


def gloo(group: ProcessGroup) -> Any:
    """Return the Gloo group behind a group's hccl, for a collective: all ranks of the group are there."""
    backend = pairs(group)
    backend.join()
    return backend


def pairs(group: ProcessGroup) -> Any:
    """Return the Gloo group for an operation between two ranks, which HCCL gives a communicator of their own."""
    return group._get_backend(torch.device("npu"))


def kernel(returns: int | None = None) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Enter a function into :data:`KERNELS`, under its own name.

    Args:
        returns: which argument the operator returns beside the work, by its schema.
    """

    def enter(function: Callable[..., Work]) -> Callable[..., Work]:
        def boxed(*args: Any) -> Any:
            group_at = next(i for i, a in enumerate(args) if isinstance(a, torch.ScriptObject))
            group = ProcessGroup.unbox(args[group_at])
            check_world(function.__name__, group.size())
            backend: Any = group._get_backend(torch.device("npu"))
            if not backend.joined:  # the communicator is made for the devices of its first tensors
                backend.device_index = first_device(args[:group_at])
            rest = [reduction(a) if isinstance(a, torch.ScriptObject) else a for a in args[group_at + 1 :]]
            work = collective(
                function.__name__,
                group,
                first_device(args[:group_at]),
                args[:group_at],
                root=rest[0] if rest else None,
                run=lambda *tensors: function(*tensors, group, *rest),
            )
            if group.group_name in _coalescing:
                _coalescing[group.group_name].append(work)
            return work.boxed() if returns is None else (args[returns], work.boxed())

        KERNELS[function.__name__] = boxed
        return function

    return enter


def first_device(values: Sequence[Any]) -> int:
    """Return the device of the first npu tensor among arguments; without one, the current device."""
    for value in values:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, torch.Tensor)):
            return first_device(value)
        if isinstance(value, torch.Tensor) and value.device.type == "npu":
            return value.get_device()
    return index_of(None)


_c10d: Any = torch._C._distributed_c10d  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
_in_flight: dict[int, Any] = {}  # point-to-point operations not waited for yet: Gloo reads their memory


def after(works: Sequence[Work], finish: Callable[[], None] | None = None) -> Work:
    """Return one handle for collectives of one group and for ``finish``, which runs after them.

    ``finish`` runs on Gloo's thread, before the group's next collective: a later collective sees what an earlier one
    wrote, as on a device stream, whether or not somebody waited in between.
    """
    if finish is None and len(works) == 1:
        return works[0]
    futures: list[Any] = [work.get_future() for work in works]

    def complete(future: Future[Any]) -> None:
        for result in future.wait():
            result.wait()  # raises what Gloo raised
        if finish is not None:
            finish()

    finished = torch.futures.collect_all(futures).then(complete)

    def wait(timeout: timedelta) -> bool:
        finished.wait()  # ends when Gloo's own timeout does; PyTorch's work around a future would swallow the error
        return True

    return _c10d.PythonCallbackWork(wait)


def point_to_point(work: Work, keep: Any) -> Work:
    """Return the handle of a send or receive. ``keep`` lives until somebody waits, even if the caller drops the handle."""
    key = id(work)
    _in_flight[key] = (work, keep)

    def wait(timeout: timedelta) -> bool:
        if key not in _in_flight:
            return True  # Gloo would wait for another message
        try:
            return work.wait(timeout) if timeout else work.wait()
        finally:
            _in_flight.pop(key, None)

    return _c10d.PythonCallbackWork(wait)


def joint_work(works: Sequence[Work]) -> Work:
    """Return one handle for several works of any kind."""

    def wait(timeout: timedelta) -> bool:
        outcomes = [work.wait(timeout) if timeout else work.wait() for work in works]  # all, even after a False
        return all(outcomes)

    return _c10d.PythonCallbackWork(wait)
