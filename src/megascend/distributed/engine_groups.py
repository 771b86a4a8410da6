"""Groups on the device backend: what an engine that makes its own must offer, and plain ones for all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from megascend.topology.topology import GROUP_AXES, Topology, rank_lists

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class EngineGroups:
    """The groups of one rank, by the names of :data:`megascend.topology.topology.GROUP_AXES`.

    Attributes:
        device: on the device backend, a group for every name.
        cpu: on Gloo, for some of the names; they carry objects from now on, and nothing else may use them.
    """

    device: dict[str, ProcessGroup]
    cpu: dict[str, ProcessGroup] = field(default_factory=dict)


class GroupFactory(Protocol):
    """Makes an engine's groups. One object for one call of :func:`megascend.distributed.process_groups.initialize`."""

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """Return all groups of ``topology``, on all ranks in the same order. Collective, after the default group exists.

        The caller holds their ranks against the topology, when all ranks have made theirs.

        Raises:
            ProcessGroupError: they cannot be made.
        """
        ...

    def limit_timeouts(self, timeout_s: float) -> None:
        """Give groups that the engine's libraries have made meanwhile the timeout of this run, in seconds."""
        ...

    def forget(self, destroy: bool) -> None:
        """Let the engine's libraries go of what :meth:`create` has made; also after :meth:`create` has raised.

        Args:
            destroy: also destroy the groups; else that of the default group takes them along.
        """
        ...


class PlainGroups:
    """Groups that torch makes from the topology. Names of the same ranks share one; those of all ranks are the default group."""

    def __init__(self) -> None:
        self._created: list[ProcessGroup] = []

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """See :class:`GroupFactory`. A world of one creates none."""
        timeout = timedelta(seconds=timeout_s)
        groups: dict[tuple[int, ...], ProcessGroup] = {
            tuple(range(topology.world_size)): dist.distributed_c10d._get_default_group()
        }
        for ranks, name in rank_lists(topology).items():
            if ranks not in groups:
                self._add(groups, ranks, dist.new_group([*ranks], timeout=timeout, group_desc=name.upper()), rank)
        ranks_by_name = {name: tuple(topology.group_of(rank, *axes)) for name, axes in GROUP_AXES.items()}
        if (rank,) in ranks_by_name.values() and (rank,) not in groups:  # without the others, who need not know of it
            self._add(groups, (rank,), dist.new_group([rank], timeout=timeout, use_local_synchronization=True), rank)
        return EngineGroups({name: groups[ranks] for name, ranks in ranks_by_name.items()})

    def _add(
        self, groups: dict[tuple[int, ...], ProcessGroup], ranks: tuple[int, ...], group: object, rank: int
    ) -> None:
        if rank in ranks:  # else it is torch's placeholder for a group of others
            assert isinstance(group, dist.ProcessGroup)
            groups[ranks] = group
            self._created.append(group)

    def limit_timeouts(self, timeout_s: float) -> None:
        """Do nothing: nobody else makes groups."""

    def forget(self, destroy: bool) -> None:
        """See :class:`GroupFactory`."""
        for group in self._created if destroy else ():
            dist.destroy_process_group(group)
        self._created.clear()
