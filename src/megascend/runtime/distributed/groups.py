"""The process groups of one rank: on the device backend, and the Gloo channels of those that carry objects."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megascend.errors import ProcessGroupError
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.runtime.distributed.channels import Channel
from megascend.runtime.distributed.engine_groups import GroupFactory
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.topology.topology import Coordinates, Topology, axes_of
from weightwire.background import BackgroundThread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

logger = logging.getLogger(__name__)

OBJECT_GROUPS = ("world", "dp", "dp_cp", "edp", "tp", "pp", "cp", "ep")
"""Groups that carry objects, in the order in which every rank creates their channels."""
BACKGROUND_TIMEOUT = timedelta(days=1)
"""Timeout of collectives on threads other than the main one."""
LEAVE_S = 10.0
"""Seconds for which a rank that has failed waits for others in destroying its groups."""


@dataclass
class ProcessGroups:
    """The groups of one rank, created by :mod:`megascend.runtime.distributed.process_groups`.

    Attributes:
        device: device of this rank's tensors.
        timeout_s: timeout of collectives, in seconds.
        monitor: publisher of this rank's phase, and reader of the others'.
        owns_default: the default group was created here, and is destroyed with the others.
        cleanup: changes to the process that are undone before the groups are destroyed.
    """

    topology: Topology
    launch: Launch
    device: torch.device
    timeout_s: float
    monitor: HangMonitor
    owns_default: bool
    _factory: GroupFactory
    _device_groups: dict[str, ProcessGroup] = field(default_factory=dict)
    _channels: dict[str, Channel] = field(default_factory=dict)
    _created: list[ProcessGroup] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def coordinates(self) -> Coordinates:
        """Return this rank's coordinates on the axes of the topology."""
        return self.topology.coordinates(self.rank)

    def ranks(self, name: str) -> list[int]:
        """Return the global ranks of this rank's group ``name``, in group order."""
        return self.topology.group_of(self.rank, *axes_of(name))

    def device_group(self, name: str) -> ProcessGroup:
        """Return the group on the device backend: tensors only, never objects."""
        return _look_up(self._device_groups, name, "process group")

    def channel(self, name: str) -> Channel:
        """Return the group's channel for objects, on Gloo; only :mod:`megascend.runtime.distributed.objects` uses it."""
        return _look_up(self._channels, name, "channel for objects")

    def new_gloo(self, label: str) -> ProcessGroup:
        """Create a separate Gloo group of all ranks, for collectives on another thread, with a timeout of a day. Collective."""
        # A background writer may wait long for a peer with a slow disk. The main thread, when it waits for the result, applies
        # its own deadline.
        group = dist.new_group(backend="gloo", timeout=BACKGROUND_TIMEOUT, group_desc=f"{label.upper()}_GLOO")
        self.register(group)  # type: ignore[reportArgumentType]
        return group  # type: ignore[reportReturnType]

    def object_group_ranks(self, name: str, rank: int) -> list[int]:
        """Return the ranks of ``rank``'s group ``name``; empty if that group carries no objects."""
        return self.topology.group_of(rank, *axes_of(name)) if name in OBJECT_GROUPS else []

    def add(self, device_groups: dict[str, ProcessGroup], channels: dict[str, Channel]) -> None:
        """Add the engine's groups and the channels for objects, by name."""
        self._device_groups |= device_groups
        self._channels |= channels

    def register(self, group: ProcessGroup) -> None:
        """Register ``group`` to be destroyed with the others."""
        self._created.append(group)

    def add_channel(self, name: str) -> None:
        """Add a channel of all ranks, under ``name``, for object collectives on another thread. Collective.

        Its timeout is that of :meth:`new_gloo`.
        """
        # Not one of OBJECT_GROUPS: deadlock detection covers the main threads' collectives only.
        ranks = list(range(self.world_size))
        self._channels[name] = Channel(name, ranks, self.rank, self.new_gloo(name), BACKGROUND_TIMEOUT.total_seconds())

    def limit_timeouts(self) -> None:
        """Set this run's timeout on groups that the engine's libraries have created themselves."""
        self._factory.limit_timeouts(self.timeout_s)

    def destroy(self, limit_s: float | None = None) -> None:
        """Destroy the engine's groups, the channels and, if it was created with them, the default group.

        NCCL destroys a communicator only together with the other ranks of the host. Ranks that wait for this one in a channel
        read in its record that it left.

        Args:
            limit_s: seconds after which to return anyway; for use after an error, which must be reported although other ranks
                are still in a collective. Default: wait.
        """
        # First, so that peers that are still in a collective see that this rank has left, not that it is silent.
        self.monitor.close()
        if not self._device_groups:
            return
        # Before the groups are cleared: the redirected functions of torch.distributed look up channels here.
        self.cleanup.close()
        self._device_groups.clear()
        self._channels.clear()
        if limit_s is None:
            self._destroy_created()
            return
        thread = BackgroundThread(self._destroy_created, name="megascend-destroy")
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            logger.warning(
                "rank %d: its process groups were not destroyed within %g s, since other ranks have not left theirs; continuing",
                self.rank,
                limit_s,
            )

    def _destroy_created(self) -> None:
        self._factory.forget(destroy=not self.owns_default)
        if self.owns_default:
            # Without an argument torch destroys every group of the process, the engine's and the channels' among them.
            dist.destroy_process_group()
        else:
            for group in self._created:
                dist.destroy_process_group(group)
        self._created.clear()


def _look_up(groups: dict[str, T], name: str, kind: str) -> T:
    if name not in groups:
        axes_of(name)  # raises for a name that does not exist
    if not groups:
        raise ProcessGroupError(f"no {kind} {name!r}: these process groups were destroyed, as by Backend.close()")
    if name not in groups:
        raise ProcessGroupError(f"group {name!r} has no {kind}; those that have: {', '.join(groups)}")
    return groups[name]
