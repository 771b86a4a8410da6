"""``hccl`` of the simulated device: collectives of npu tensors, carried out by Gloo on the memory behind them.

Each hccl group is a ``ProcessGroupGloo`` (``hccl_group``), registered for npu tensors only. PyTorch sends a collective
of npu tensors to the c10d operators' kernels for the npu key, which are ours (``hccl_reductions``, ``hccl_movement``).
What HCCL refuses is refused with its words (torch_npu/csrc/distributed/ProcessGroupHCCL.cpp): data types that it does not reduce,
non-contiguous tensors, receiving from any source. Reductions run in the tensors' own precision, as on hardware.

Object collectives go through device memory, as on hardware, with a warning or an error.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from simnpu import hccl_movement as hccl_movement  # entered into KERNELS by being imported
from simnpu import hccl_reductions as hccl_reductions
from simnpu.errors import ConfigError, PlatformError
from simnpu.hccl_group import BACKEND, create, forget_when_shut_down, is_hccl
from simnpu.hccl_registry import KERNELS, end_coalescing, joint_work, start_coalescing
from simnpu.settings import OBJECTS_VARIABLE

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
    """Build a kernel for every collective of PyTorch's devices: a missing one would reach Gloo with npu tensors."""
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
        return joint_work(end_coalescing(group)) if is_hccl(group, device) else end(group, device)

    cls._start_coalescing, cls._end_coalescing = _start_coalescing, _end_coalescing


OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
REMEDY = 'A Gloo group carries them without the device: torch.distributed.new_group(ranks, backend="gloo")'

_warned: set[str] = set()


def watch_objects() -> None:
    """Look at every object collective before anything is sent, on every rank.

    The public functions are replaced by name. Copies made earlier (``from torch.distributed import
    all_gather_object``) still check_object_collective up ``_get_object_coll_device`` and ``_object_to_tensor`` in their module.
    """
    c10d: Any = distributed_c10d
    device_of, to_tensor = c10d._get_object_coll_device, c10d._object_to_tensor

    def _get_object_coll_device(group: ProcessGroup | None = None) -> str:
        device = device_of(group)
        caller = sys._getframe(1).f_code.co_name
        if caller in OBJECT_COLLECTIVES:
            check_object_collective(group, device, caller)
        return device

    def _object_to_tensor(obj: Any, device: Any, group: ProcessGroup) -> Any:
        check_object_collective(group, device, sys._getframe(1).f_code.co_name)
        return to_tensor(obj, device, group)

    def checking(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                check_object_collective(kwargs.get("group"), kwargs["device"], function.__name__)
            return function(*args, **kwargs)

        return wrapper

    c10d._get_object_coll_device, c10d._object_to_tensor = _get_object_coll_device, _object_to_tensor
    for name in OBJECT_COLLECTIVES:
        wrapper = checking(getattr(c10d, name))
        setattr(c10d, name, wrapper)
        setattr(dist, name, wrapper)


def check_object_collective(group: ProcessGroup | None, device: Any, name: str) -> None:
    """Refuse the object collective ``name``, or warn of it once a process, where it would go over hccl."""
    chosen: Any = group or distributed_c10d._get_default_group()
    if device is None or chosen == dist.GroupMember.NON_GROUP_MEMBER or not is_hccl(chosen, device):
        return
    caller = f"{name} on an hccl group (rank {dist.get_rank()})"
    if refused():
        raise RuntimeError(
            f"{caller}: the simulated HCCL refuses object collectives ({OBJECTS_VARIABLE}=refuse). {REMEDY}"
        )
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{caller} pickles objects into device memory. {REMEDY}", RuntimeWarning, stacklevel=4)


def refused() -> bool:
    text = os.environ.get(OBJECTS_VARIABLE) or "warn"
    if text not in ("warn", "refuse"):
        raise ConfigError(f"{OBJECTS_VARIABLE}={text!r}: expected warn or refuse")
    return text == "refuse"
