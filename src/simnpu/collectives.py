"""``hccl`` of the simulated device: collectives of npu tensors, carried out by Gloo on the memory behind them.

Each hccl group is a ``ProcessGroupGloo`` (``hccl_group``), registered for npu tensors only. PyTorch sends a collective
of npu tensors to the c10d operators' kernels for the npu key, which are ours (``hccl_reductions``, ``hccl_movement``).
What HCCL refuses is refused with its words (torch_npu/csrc/distributed/ProcessGroupHCCL.cpp): data types that it does not reduce,
non-contiguous tensors, receiving from any source. Reductions run in the tensors' own precision, as on hardware.

Object collectives go through device memory, as on hardware, with a warning or an error (``hccl_objects``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from simnpu import hccl_movement as hccl_movement  # entered into KERNELS by being imported
from simnpu import hccl_reductions as hccl_reductions
from simnpu.errors import PlatformError
from simnpu.hccl_group import BACKEND, create, forget_when_shut_down, is_hccl
from simnpu.hccl_objects import watch_objects
from simnpu.hccl_registry import KERNELS, end_coalescing, start_coalescing
from simnpu.work import together

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make ``hccl`` a backend of torch.distributed. Idempotent; after :func:`simnpu.device.register`."""
    if _libraries:
        return
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["npu"])
    c10d = torch.library.Library("c10d", "IMPL")
    assert c10d.m is not None  # None only after the library was destroyed
    enter = c10d.m.impl
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # PyTorch's kernels, replaced
        for name, kernel in _all_kernels():
            enter(name, "PrivateUse1", kernel)
    _libraries.append(c10d)
    forget_when_shut_down()
    _allow_coalescing()
    watch_objects()


def _all_kernels() -> Iterable[tuple[str, Callable[..., Any]]]:
    """One for each collective that PyTorch has for devices of its kind: a missing one would reach Gloo as npu tensors."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    expected = {name.removeprefix("c10d::") for name in registered if name.startswith("c10d::")}
    if expected != KERNELS.keys():
        raise PlatformError(
            f"the simulated hccl carries {sorted(KERNELS)}, but torch {torch.__version__} has the collectives "
            f"{sorted(expected)}: not a version it supports"
        )
    return KERNELS.items()


def _allow_coalescing() -> None:
    """``_coalescing_manager(device=...)``: Gloo has no coalescing, so the works are collected here."""
    cls: Any = ProcessGroup
    start, end = cls._start_coalescing, cls._end_coalescing

    def _start_coalescing(group: ProcessGroup, device: torch.device) -> None:
        if is_hccl(group, device):
            start_coalescing(group)
        else:
            start(group, device)

    def _end_coalescing(group: ProcessGroup, device: torch.device) -> Any:
        return together(end_coalescing(group)) if is_hccl(group, device) else end(group, device)

    cls._start_coalescing, cls._end_coalescing = _start_coalescing, _end_coalescing
