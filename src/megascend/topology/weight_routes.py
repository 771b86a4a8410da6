"""Which ranks a parameter's shards travel between on their way out of the model. Pure arithmetic on the topology.

A parameter lives on one pipeline stage (an expert's: on one expert rank of one stage), split over the tensor parallel ranks
there. Its shards go to the stage of whoever receives, each over its own pipeline group, and are put together only there.
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
    """One rank's part in bringing a parameter to its receivers; global ranks, ascending.

    Attributes:
        across: the ranks that hold this rank's shard of some layer (or expert): one of them has it, others may need it.
        need_shard: those of ``across`` that need a shard of a split parameter: who receives, or puts it together for one.
        need_whole: those of ``across`` that need a parameter that is not split: receivers.
        parts: this rank's tensor parallel group, in the order of the shards.
        receivers: those of ``parts`` that receive.
    """

    across: tuple[int, ...]
    need_shard: tuple[int, ...]
    need_whole: tuple[int, ...]
    parts: tuple[int, ...]
    receivers: tuple[int, ...]


def ranks_of(receivers: Receivers, topology: Topology) -> frozenset[int]:
    """The global ranks that ``receivers`` means: all of them, the main rank (0), or those listed."""
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
    """The route of ``rank``, for parameters of experts or for all others."""
    across_axes = ("expert", "pipeline") if expert else ("pipeline",)
    part_axis = "expert_tensor" if expert else "tensor"
    across = topology.group_of(rank, *across_axes)
    parts = topology.group_of(rank, part_axis)
    wanted = set(receivers)
    return Route(
        tuple(across),
        tuple(peer for peer in across if wanted.intersection(topology.group_of(peer, part_axis))),
        tuple(peer for peer in across if peer in wanted),
        tuple(parts),
        tuple(peer for peer in parts if peer in wanted),
    )


def participants(topology: Topology, receivers: Collection[int]) -> frozenset[int]:
    """Return the ranks without which ``receivers`` cannot have every parameter, without their replicas.

    A rank takes part in all collectives of its pipeline (and experts') or in none, so whoever shares one is included.
    """
    grids: list[tuple[str, ...]] = [("tensor", "pipeline")]
    if topology.is_moe:
        grids.append(("expert_tensor", "expert", "pipeline"))
    groups = [frozenset(ranks) for axes in grids for ranks in topology.groups(*axes)]
    found = frozenset(receivers)
    while True:
        wider = found.union(*(group for group in groups if group & found))
        if wider == found:
            return found
        found = wider
