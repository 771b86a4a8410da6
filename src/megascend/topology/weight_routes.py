"""Routes of a parameter's shards from the model's ranks to the receivers. Pure arithmetic on the topology.

A parameter is on one pipeline stage (an expert's: on one expert rank of one stage), split over the tensor parallel ranks there.
Its shards are sent to the receiver's stage, each over its own pipeline group, and only assembled there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from megascend.errors import TopologyError
from megascend.topology.topology import Topology

Receivers = Literal["all", "main"] | Collection[int]


@dataclass(frozen=True)
class Route:
    """Communication of one rank when a parameter is sent to its receivers; global ranks, ascending.

    Attributes:
        across: ranks with this rank's shard of some layer (or expert): one of them has it, others may need it.
        need_shard: ranks of ``across`` that need a shard of a split parameter: receivers, and ranks that assemble for one.
        need_whole: ranks of ``across`` that need an unsplit parameter: receivers.
        parts: this rank's tensor parallel group, in the order of the shards.
        receivers: ranks of ``parts`` that receive.
    """

    across: tuple[int, ...]
    need_shard: tuple[int, ...]
    need_whole: tuple[int, ...]
    parts: tuple[int, ...]
    receivers: tuple[int, ...]


def ranks_of(receivers: Receivers, topology: Topology) -> frozenset[int]:
    """Resolve ``receivers`` to global ranks: all, the main rank (0), or those listed."""
    if receivers == "all":
        return frozenset(range(topology.world_size))
    if receivers == "main":
        return frozenset([0])
    ranks = frozenset(receivers) if not isinstance(receivers, str) else frozenset()
    if not ranks or not all(isinstance(rank, int) and 0 <= rank < topology.world_size for rank in ranks):
        raise TopologyError(
            f'receivers must be "all", "main" or ranks of the world of {topology.world_size}, got {receivers!r}'
        )
    return ranks


def route(topology: Topology, rank: int, receivers: Collection[int], *, expert: bool) -> Route:
    """Build the route of ``rank``, for parameters of experts or for all others."""
    across_axes = ("expert", "pipeline") if expert else ("pipeline",)
    part_axis = "expert_tensor" if expert else "tensor"
    across = topology.group_of(rank, *across_axes)
    parts = topology.group_of(rank, part_axis)
    receiving = set(receivers)
    return Route(
        tuple(across),
        # A peer needs the shard if anybody in its tensor parallel group receives: the whole group assembles for that rank.
        tuple(peer for peer in across if receiving.intersection(topology.group_of(peer, part_axis))),
        tuple(peer for peer in across if peer in receiving),
        tuple(parts),
        tuple(peer for peer in parts if peer in receiving),
    )


def participants(topology: Topology, receivers: Collection[int]) -> frozenset[int]:
    """Return the ranks that must take part for ``receivers`` to get every parameter; replicas need not.

    A rank joins all collectives of its pipeline (and experts') groups or none, so all ranks that share a group are included.
    """
    grids: list[tuple[str, ...]] = [("tensor", "pipeline")]
    if topology.is_moe:
        grids.append(("expert_tensor", "expert", "pipeline"))
    groups = [frozenset(ranks) for axes in grids for ranks in topology.groups(*axes)]
    members = frozenset(receivers)
    while True:  # groups of the two grids overlap, so a group may pull in another
        extended = members.union(*(group for group in groups if group & members))
        if extended == members:
            return members
        members = extended
