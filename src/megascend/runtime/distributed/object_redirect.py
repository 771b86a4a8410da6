"""Redirect object collectives that upstream runs on a device group to the group's channel for objects.

Megatron-Core gathers Python objects in a few places (the optimizer compares parameter groups, checkpointing its plans), on the
default group: over HCCL or NCCL they would be pickled into device tensors. These call sites take no group, so the functions of
``torch.distributed`` are patched for as long as the process groups live.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megascend.changes import patched
from megascend.errors import ProcessGroupError
from megascend.runtime.distributed.groups import OBJECT_GROUPS
from megascend.runtime.distributed.objects import agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascend.runtime.distributed.groups import ProcessGroups

FUNCTIONS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class ObjectCollectiveRedirect:
    """Patch that runs object collectives on Gloo for device groups that have a channel, and raises for the others.

    Before each, the ranks check that all of them are in the same call, so that upstream never receives an object of megascend's.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._single_rank: ProcessGroup | None = None

    def install(self) -> None:
        """Patch the functions of ``torch.distributed`` until the groups are destroyed."""
        for name in FUNCTIONS:
            redirection = self._redirected(getattr(dist, name))
            change = patched(dist, name, redirection, "travels over Gloo while process groups live")
            self._groups.cleanup.enter_context(change)

    def _redirected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            # Bound to the signature because callers pass `group` by position as well as by keyword.
            call = signature.bind(*args, **kwargs)
            group = call.arguments.get("group")
            if group is None or dist.get_backend(group) != "gloo":
                call.arguments["group"] = self._on_gloo(group, original.__name__)
                # broadcast_object_list alone takes a device; a caller that names its accelerator would fail on Gloo.
                if "device" in signature.parameters:
                    call.arguments["device"] = torch.device("cpu")
            return original(*call.args, **call.kwargs)

        return function

    def _on_gloo(self, group: ProcessGroup | None, caller: str) -> ProcessGroup:
        """Return the Gloo group to use instead of ``group``, after all its ranks have entered ``caller``."""
        name = self._name(group, caller)
        agree(f"{caller} of torch.distributed", self._groups, group_name=name)
        # A channel of one rank has no group, but upstream's function needs one, even to copy an object to itself.
        return self._groups.channel(name).group or self._single_rank_group()

    def _name(self, group: ProcessGroup | None, caller: str) -> str:
        if group is None:
            return "world"
        for name in OBJECT_GROUPS:
            if self._groups.device_group(name) is group:
                return name
        raise ProcessGroupError(
            f"{caller} on a {dist.get_backend(group)} group of ranks {dist.get_process_group_ranks(group)}, which carries no "
            "objects: use gather_objects, or a group made with backend='gloo'"
        )

    def _single_rank_group(self) -> ProcessGroup:
        if self._single_rank is None:
            # Local synchronization: only this rank makes the call.
            group = dist.new_group([self._groups.rank], backend="gloo", use_local_synchronization=True)
            self._single_rank = group  # type: ignore[assignment]
            assert self._single_rank is not None
            self._groups.register(self._single_rank)
        return self._single_rank
