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


def mesh_ranks(world_size: int, replicas: int) -> list[list[int]]:
    """Ranks of each copy of the model, neighbours together. Pure.

    Raises:
        TopologyError: the ranks cannot be divided by the copies.
    """
    if world_size % replicas:
        raise TopologyError(
            f"fsdp.replicate={replicas} does not divide the {world_size} processes; each copy of the model is spread over "
            "an equal number of them"
        )
    size = world_size // replicas
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
    if topology.expert > 1:
        raise TopologyError(
            f"parallel.expert={topology.expert}: engine fsdp does not have expert parallelism yet (docs/fsdp.md); set 1, or use "
            "engine megatron"
        )
    if topology.context > 1 and topology.context_algorithm != "ulysses":
        raise TopologyError(
            f"parallel.context={topology.context} with context_algorithm={topology.context_algorithm!r}: engine fsdp exchanges "
            "heads; set parallel.context_algorithm: ulysses"
        )


class FsdpGroups(PlainGroups):
    """The plain groups, and with several copies of the model those along both axes of the mesh."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas
        self._axes: list[ProcessGroup] = []  # this rank's groups: across the copies, within its copy

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """See :class:`megascend.distributed.engine_groups.GroupFactory`."""
        made = super().create(topology, rank, timeout_s)
        if self._replicas > 1:
            copies = mesh_ranks(topology.world_size, self._replicas)
            timeout = timedelta(seconds=timeout_s)
            for name, axis in (("REPLICATE", zip(*copies, strict=True)), ("SHARD", copies)):
                for ranks in axis:
                    group = dist.new_group([*ranks], timeout=timeout, group_desc=name)
                    if rank in ranks:
                        assert isinstance(group, dist.ProcessGroup)
                        self._created.append(group)
                        self._axes.append(group)
        return made

    def mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        """``fully_shard``'s mesh: one axis, or (copies, ranks of a copy)."""
        if self._replicas == 1:
            return DeviceMesh.from_group(
                dist.distributed_c10d._get_default_group(), device_type, mesh_dim_names=("shard",)
            )
        ranks = torch.tensor(mesh_ranks(world_size, self._replicas), dtype=torch.int)
        return DeviceMesh.from_group(self._axes, device_type, ranks, mesh_dim_names=("replicate", "shard"))

    def forget(self, destroy: bool) -> None:
        """See :class:`megascend.distributed.engine_groups.GroupFactory`."""
        super().forget(destroy)
        self._axes.clear()
