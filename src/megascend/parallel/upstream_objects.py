"""Object collectives that upstream calls on a device group, sent to the group's Gloo twin.

Megatron-Core gathers Python objects in a few places of its own (the optimizer compares parameter groups, checkpointing its
plans), on the default group: over HCCL or NCCL they would be pickled into device tensors. Their callers cannot be told
another group, so ``torch.distributed``'s functions are exchanged for as long as the process groups live.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megascend.errors import ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FUNCTIONS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class ObjectDetour:
    """While installed, object collectives on ``twins``' device groups run on their Gloo twins; on others they raise.

    Args:
        default: the Gloo twin of the default group.
        twins: (device group, Gloo twin) pairs.
    """

    def __init__(self, default: ProcessGroup, twins: list[tuple[ProcessGroup, ProcessGroup]]) -> None:
        self._default = default
        self._twins = twins
        self._originals: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Exchange the functions of ``torch.distributed``."""
        for name in FUNCTIONS:
            original = getattr(dist, name)
            self._originals[name] = original
            setattr(dist, name, self._detour(original))

    def remove(self) -> None:
        """Put the functions back."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def _detour(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            group = call.arguments.get("group")
            if group is None or dist.get_backend(group) != "gloo":
                call.arguments["group"] = self._twin(group, original.__name__)
                if "device" in signature.parameters:
                    call.arguments["device"] = torch.device("cpu")
            return original(*call.args, **call.kwargs)

        return function

    def _twin(self, group: ProcessGroup | None, caller: str) -> ProcessGroup:
        if group is None:
            return self._default
        for device_group, twin in self._twins:
            if device_group is group:
                return twin
        raise ProcessGroupError(
            f"{caller} on a {dist.get_backend(group)} group of ranks {dist.get_process_group_ranks(group)}, which has no Gloo "
            "twin: Python objects do not travel over device groups. Use megascend.parallel.objects.gather_objects, or a "
            "group made with backend='gloo'"
        )
