"""The kernels of the c10d operators for npu tensors, as the modules that write them enter them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from simnpu.hccl_checks import reduction

KERNELS: dict[str, Callable[..., Any]] = {}
_coalescing: dict[str, list[Work]] = {}  # by group name: works since start_coalescing


def start_coalescing(group: ProcessGroup) -> None:
    _coalescing[group.group_name] = []


def end_coalescing(group: ProcessGroup) -> list[Work]:
    return _coalescing.pop(group.group_name)


def gloo(group: ProcessGroup) -> Any:
    """The Gloo behind a group's hccl, for a collective: all ranks of the group are there."""
    backend = pairs(group)
    backend.join()
    return backend


def pairs(group: ProcessGroup) -> Any:
    """The same for an operation between two ranks, which HCCL gives a communicator of their own."""
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
            rest = [reduction(a) if isinstance(a, torch.ScriptObject) else a for a in args[group_at + 1 :]]
            work = function(*args[:group_at], group, *rest)
            if group.group_name in _coalescing:
                _coalescing[group.group_name].append(work)
            return work.boxed() if returns is None else (args[returns], work.boxed())

        KERNELS[function.__name__] = boxed
        return function

    return enter
