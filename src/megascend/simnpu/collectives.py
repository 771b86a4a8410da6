"""``hccl`` of the simulated device: collectives of npu tensors, carried out by Gloo on the memory behind them.

Each hccl group owns a ``ProcessGroupGloo``, registered for npu tensors only. PyTorch sends a collective of npu tensors
to the c10d operators' kernels for the npu key, which are ours (``hccl_reductions``, ``hccl_movement``). What HCCL
refuses is refused with its words (torch_npu/csrc/distributed/ProcessGroupHCCL.cpp): data types that it does not reduce,
non-contiguous tensors, receiving from any source. Reductions run in the tensors' own precision, as on hardware.

Object collectives are refused, although HCCL can carry them: they go through device memory, and they are how training
jobs hang. megascend keeps them on Gloo groups, and the simulation holds everybody to it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo, distributed_c10d

from megascend.errors import PlatformError
from megascend.simnpu import hccl_movement as hccl_movement  # entered into KERNELS by being imported
from megascend.simnpu import hccl_reductions as hccl_reductions
from megascend.simnpu.hccl_registry import KERNELS, end_coalescing, start_coalescing
from megascend.simnpu.work import together

BACKEND = "hccl"
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make ``hccl`` a backend of torch.distributed. Idempotent; after :func:`megascend.simnpu.device.register`."""
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
    _allow_coalescing()
    _refuse_objects()


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


def create(options: Any, backend_options: Any = None) -> Any:
    """The backend of one hccl group. One thread: collectives of a group run in order, as on a device stream."""
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
    gloo._devices = [ProcessGroupGloo.create_default_device()]
    gloo._threads = 1
    gloo._timeout = options.timeout
    gloo.global_ranks_in_group = options.global_ranks_in_group
    gloo.group_name = options.group_id
    return ProcessGroupGloo(options.store, options.group_rank, options.group_size, gloo)


def _is_hccl(group: ProcessGroup, device: Any) -> bool:
    return torch.device(device).type == "npu" and BACKEND in str(dist.get_backend_config(group))


def _allow_coalescing() -> None:
    """``_coalescing_manager(device=...)``: Gloo has no coalescing, so the works are collected here."""
    cls: Any = ProcessGroup
    start, end = cls._start_coalescing, cls._end_coalescing

    def _start_coalescing(group: ProcessGroup, device: torch.device) -> None:
        if _is_hccl(group, device):
            start_coalescing(group)
        else:
            start(group, device)

    def _end_coalescing(group: ProcessGroup, device: torch.device) -> Any:
        return together(end_coalescing(group)) if _is_hccl(group, device) else end(group, device)

    cls._start_coalescing, cls._end_coalescing = _start_coalescing, _end_coalescing


def _refuse_objects() -> None:
    """Object collectives of an hccl group raise, on every rank and before anything is sent.

    The public functions are replaced by name. Copies made earlier (``from torch.distributed import
    all_gather_object``) still look up ``_get_object_coll_device`` and ``_object_to_tensor`` in their module.
    """
    c10d: Any = distributed_c10d
    device_of, to_tensor = c10d._get_object_coll_device, c10d._object_to_tensor

    def refuse(group: ProcessGroup | None, device: Any, name: str) -> None:
        chosen: Any = group or c10d._get_default_group()
        if device is not None and chosen != dist.GroupMember.NON_GROUP_MEMBER and _is_hccl(chosen, device):
            raise RuntimeError(
                f"{name} on an hccl group (rank {dist.get_rank()}): the simulated HCCL refuses object collectives. Use a "
                'Gloo group: torch.distributed.new_group(ranks, backend="gloo")'
            )

    def _get_object_coll_device(group: ProcessGroup | None = None) -> str:
        device = device_of(group)
        caller = sys._getframe(1).f_code.co_name
        if caller in OBJECT_COLLECTIVES:
            refuse(group, device, caller)
        return device

    def _object_to_tensor(obj: Any, device: Any, group: ProcessGroup) -> Any:
        refuse(group, device, sys._getframe(1).f_code.co_name)
        return to_tensor(obj, device, group)

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                refuse(kwargs.get("group"), kwargs["device"], function.__name__)
            return function(*args, **kwargs)

        return wrapper

    c10d._get_object_coll_device, c10d._object_to_tensor = _get_object_coll_device, _object_to_tensor
    for name in OBJECT_COLLECTIVES:
        wrapper = refusing(getattr(c10d, name))
        setattr(c10d, name, wrapper)
        setattr(dist, name, wrapper)
