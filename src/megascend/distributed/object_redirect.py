"""Object collectives that upstream calls on a device group, sent to the group's channel for objects.

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

from megascend.changes import patch, restore
from megascend.distributed.objects import agree
from megascend.errors import ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascend.distributed.groups import ProcessGroups

FUNCTIONS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class ObjectCollectiveRedirect:
    """While installed, object collectives on device groups that carry objects run on Gloo; on others they raise.

    Before each, the ranks make sure that all of them are in it: an object of ours is never handed out as upstream's.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._originals: dict[str, Callable[..., Any]] = {}
        self._single_rank: ProcessGroup | None = None

    def install(self) -> None:
        """Exchange the functions of ``torch.distributed``."""
        for name in FUNCTIONS:
            redirected = self._redirected(getattr(dist, name))
            self._originals[name] = patch(dist, name, redirected, "travels over Gloo while process groups live")

    def remove(self) -> None:
        """Put the functions back."""
        for name, original in self._originals.items():
            restore(dist, name, original)
        self._originals.clear()

    def _redirected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            group = call.arguments.get("group")
            if group is None or dist.get_backend(group) != "gloo":
                call.arguments["group"] = self._on_gloo(group, original.__name__)
                if "device" in signature.parameters:
                    call.arguments["device"] = torch.device("cpu")
            return original(*call.args, **call.kwargs)

        return function

    def _on_gloo(self, group: ProcessGroup | None, caller: str) -> ProcessGroup:
        """Return the Gloo group to use in place of ``group``, after all its ranks have come to ``caller``."""
        name = self._name(group, caller)
        agree(f"{caller} of torch.distributed", self._groups, group_name=name)
        return self._groups.channel(name).group or self._single_rank_group()

    def _name(self, group: ProcessGroup | None, caller: str) -> str:
        if group is None:
            return "world"
        for name in self._groups.carriers:
            if self._groups.device_group(name) is group:
                return name
        raise ProcessGroupError(
            f"{caller} on a {dist.get_backend(group)} group of ranks {dist.get_process_group_ranks(group)}, which carries no "
            "objects: they do not travel over device groups. Use megascend.distributed.objects.gather_objects, or a group made "
            "with backend='gloo'"
        )

    def _single_rank_group(self) -> ProcessGroup:
        if self._single_rank is None:
            self._single_rank = dist.new_group([self._groups.rank], backend="gloo", use_local_synchronization=True)  # type: ignore[assignment]
            assert self._single_rank is not None
            self._groups.register(self._single_rank)
        return self._single_rank
