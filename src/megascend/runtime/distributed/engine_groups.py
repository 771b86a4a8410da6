"""Groups on the device backend: the interface of an engine that creates its own, and plain ones for all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from megascend.runtime.topology.topology import GROUP_AXES, Topology, rank_lists

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class EngineGroups:
    """The groups of one rank, by the names of :data:`megascend.runtime.topology.topology.GROUP_AXES`.

    Attributes:
        device: groups on the device backend, one for every name.
        cpu: Gloo groups, for some of the names; reserved for object collectives from now on.
    """

    device: dict[str, ProcessGroup]
    cpu: dict[str, ProcessGroup] = field(default_factory=dict)


class GroupFactory(Protocol):
    """Factory of an engine's groups, for a single call of :func:`megascend.runtime.distributed.process_groups.initialize`."""

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """Return all groups of ``topology``, on all ranks in the same order. Collective, after the default group exists.

        The caller compares their ranks with the topology once all ranks have created theirs.
        """
        ...

    def limit_timeouts(self, timeout_s: float) -> None:
        """Set the timeout, in seconds, of groups that the engine's libraries have created themselves."""
        ...

    def forget(self, destroy: bool) -> None:
        """Remove the groups of :meth:`create` from the engine's libraries; also called after :meth:`create` has raised.

        Args:
            destroy: also destroy the groups; else they are destroyed together with the default group.
        """
        ...


class PlainGroups:
    """Groups created by torch from the topology. Names of the same ranks share one; those of all ranks are the default group."""

    def __init__(self) -> None:
        self._created: list[ProcessGroup] = []

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """See :class:`GroupFactory`. A world of one creates none."""
        timeout = timedelta(seconds=timeout_s)
        groups: dict[tuple[int, ...], ProcessGroup] = {
            tuple(range(topology.world_size)): dist.distributed_c10d._get_default_group()
        }
        # new_group is collective over the world: every rank calls it for every group, including those that it is not in.
        for ranks, name in rank_lists(topology).items():
            if ranks not in groups:
                self._add(groups, ranks, dist.new_group([*ranks], timeout=timeout, group_desc=name.upper()), rank)
        ranks_by_name = {name: tuple(topology.group_of(rank, *axes)) for name, axes in GROUP_AXES.items()}
        if (rank,) in ranks_by_name.values() and (rank,) not in groups:
            # Local synchronization: only this rank is a member, so the others need not make this call.
            self._add(groups, (rank,), dist.new_group([rank], timeout=timeout, use_local_synchronization=True), rank)
        return EngineGroups({name: groups[ranks] for name, ranks in ranks_by_name.items()})

    def _add(
        self, groups: dict[tuple[int, ...], ProcessGroup], ranks: tuple[int, ...], group: object, rank: int
    ) -> None:
        if rank in ranks:  # new_group returns a placeholder, not a ProcessGroup, to ranks that are not in the group
            assert isinstance(group, dist.ProcessGroup)
            groups[ranks] = group
            self._created.append(group)

    def limit_timeouts(self, timeout_s: float) -> None:
        """Do nothing: no library creates groups of its own."""

    def forget(self, destroy: bool) -> None:
        """See :class:`GroupFactory`."""
        for group in self._created if destroy else ():
            dist.destroy_process_group(group)
        self._created.clear()
