"""Which ranks share a copy of the model, and which hold the same part of different copies."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megascend.distributed.engine_groups import EngineGroups, PlainGroups
from megascend.errors import TopologyError
from megascend.topology.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascend.distributed.process_groups import ProcessGroups


def mesh_ranks(world_size: int, replicas: int, expert: int = 1) -> list[list[int]]:
    """Ranks of each copy of the model, neighbours together. Pure.

    Args:
        expert: ranks that hold different experts; neighbours, too.

    Raises:
        TopologyError: the ranks cannot be divided by the copies, or a copy's by the experts'.
    """
    if world_size % replicas:
        raise TopologyError(
            f"fsdp.replicate={replicas} does not divide the {world_size} processes; each copy of the model is spread over "
            "an equal number of them"
        )
    size = world_size // replicas
    if size % expert:
        raise TopologyError(
            f"parallel.expert={expert} does not divide the {size} processes of a copy of the model (fsdp.replicate={replicas})"
        )
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def check_layout(topology: Topology) -> None:
    """Refuse axes that this engine does not have.

    Raises:
        TopologyError: with the setting to change.
    """
    for axis in ("tensor", "pipeline", "expert_tensor"):
        if topology.size(axis) > 1:
            raise TopologyError(
                f"parallel.{axis}={topology.size(axis)}: engine fsdp has no such axis; set 1, or use engine megatron"
            )
    if topology.context > 1 and topology.context_algorithm != "ulysses":
        raise TopologyError(
            f"parallel.context={topology.context} with context_algorithm={topology.context_algorithm!r}: engine fsdp exchanges "
            "heads; set parallel.context_algorithm: ulysses"
        )


def _line(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))


class FsdpGroups(PlainGroups):
    """The plain groups, and with several copies of the model those along both axes of its mesh and of the experts'."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas
        self._axes: dict[str, ProcessGroup] = {}  # this rank's groups: across the copies, within its copy

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """See :class:`megascend.distributed.engine_groups.GroupFactory`."""
        made = super().create(topology, rank, timeout_s)
        if self._replicas > 1:
            copies = mesh_ranks(topology.world_size, self._replicas, topology.expert)
            axes = {"REPLICATE": [list(ranks) for ranks in zip(*copies, strict=True)], "SHARD": copies}
            if topology.expert > 1:
                parts = [ranks[first :: topology.expert] for ranks in copies for first in range(topology.expert)]
                axes["EXPERT_SHARD"] = parts
            for name, axis in axes.items():
                for ranks in axis:
                    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), group_desc=name)
                    if rank in ranks:
                        assert isinstance(group, dist.ProcessGroup)
                        self._created.append(group)
                        self._axes[name] = group
        return made

    def mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        """``fully_shard``'s mesh: one axis, or (copies, ranks of a copy)."""
        if self._replicas == 1:
            return _line(dist.distributed_c10d._get_default_group(), device_type)
        return self._grid(mesh_ranks(world_size, self._replicas), "SHARD", device_type)

    def expert_mesh(self, topology: Topology, groups: ProcessGroups) -> DeviceMesh:
        """The same of the ranks that hold this rank's experts."""
        device_type = groups.device.type
        if self._replicas == 1:
            return _line(groups.device_group("edp"), device_type)
        first = groups.coordinates.expert
        copies = mesh_ranks(topology.world_size, self._replicas, topology.expert)
        return self._grid([ranks[first :: topology.expert] for ranks in copies], "EXPERT_SHARD", device_type)

    def _grid(self, ranks: list[list[int]], within: str, device_type: str) -> DeviceMesh:
        axes = [self._axes["REPLICATE"], self._axes[within]]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(axes, device_type, torch.tensor(ranks, dtype=torch.int), mesh_dim_names=names)

    def forget(self, destroy: bool) -> None:
        """See :class:`megascend.distributed.engine_groups.GroupFactory`."""
        super().forget(destroy)
        self._axes.clear()
