"""Object collectives on hccl groups: allowed with a warning, as HCCL carries them, or refused by a setting.

They pickle objects into device memory, and a rank out of step then reads another's object. ``SIMNPU_OBJECTS``
says what to do about it: ``warn`` (the default) or ``refuse``, for programs that mean to send objects over Gloo only
and want the simulation to hold them to that.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from simnpu.errors import ConfigError
from simnpu.hccl_group import is_hccl
from simnpu.settings import OBJECTS_VARIABLE, read

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
    all_gather_object``) still look up ``_get_object_coll_device`` and ``_object_to_tensor`` in their module.
    """
    c10d: Any = distributed_c10d
    device_of, to_tensor = c10d._get_object_coll_device, c10d._object_to_tensor

    def _get_object_coll_device(group: ProcessGroup | None = None) -> str:
        device = device_of(group)
        caller = sys._getframe(1).f_code.co_name
        if caller in OBJECT_COLLECTIVES:
            look(group, device, caller)
        return device

    def _object_to_tensor(obj: Any, device: Any, group: ProcessGroup) -> Any:
        look(group, device, sys._getframe(1).f_code.co_name)
        return to_tensor(obj, device, group)

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                look(kwargs.get("group"), kwargs["device"], function.__name__)
            return function(*args, **kwargs)

        return wrapper

    c10d._get_object_coll_device, c10d._object_to_tensor = _get_object_coll_device, _object_to_tensor
    for name in OBJECT_COLLECTIVES:
        wrapper = looking(getattr(c10d, name))
        setattr(c10d, name, wrapper)
        setattr(dist, name, wrapper)


def look(group: ProcessGroup | None, device: Any, name: str) -> None:
    """Refuse the object collective ``name``, or warn of it once a process, where it would go over hccl."""
    chosen: Any = group or distributed_c10d._get_default_group()
    if device is None or chosen == dist.GroupMember.NON_GROUP_MEMBER or not is_hccl(chosen, device):
        return
    where = f"{name} on an hccl group (rank {dist.get_rank()})"
    if refused():
        raise RuntimeError(
            f"{where}: the simulated HCCL refuses object collectives ({OBJECTS_VARIABLE}=refuse). {REMEDY}"
        )
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{where} pickles objects into device memory. {REMEDY}", RuntimeWarning, stacklevel=4)


def refused() -> bool:
    text = read(OBJECTS_VARIABLE) or "warn"
    if text not in ("warn", "refuse"):
        raise ConfigError(f"{OBJECTS_VARIABLE}={text!r}: expected warn or refuse")
    return text == "refuse"
