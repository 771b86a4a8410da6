"""Routes of weights, replayed rank by rank: every receiver gets every shard, and no other rank gets any."""

import pytest

from megascend.config import Parallel
from megascend.errors import TopologyError
from megascend.runtime.topology.topology import EXPERT_AXES, Topology, participants, plan, ranks_of, route

LAYOUTS = [
    (1, Parallel()),
    (2, Parallel(tensor=2)),
    (8, Parallel(tensor=2, pipeline=2)),
    (8, Parallel(tensor=2, pipeline=2, context=2)),
    (4, Parallel(expert=2)),
    (8, Parallel(tensor=2, expert=4, expert_tensor=1)),
    (8, Parallel(tensor=2, expert=2, expert_tensor=2, pipeline=2)),
    (16, Parallel(tensor=2, expert=2, expert_tensor=1, pipeline=2)),
    (16, Parallel(tensor=4, expert=2, expert_tensor=2, pipeline=2)),
]
RECEIVERS = ["all", "main", [0, 1], [-1], [0, -1]]


def holders(topology: Topology, *, expert: bool) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """Return the ranks that hold each shard, by a parameter's stage, or stage and expert rank."""
    part = "expert_tensor" if expert else "tensor"
    ranks_by_shard: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank in range(topology.world_size):
        coordinates = topology.coordinates(rank)
        position = (coordinates.pipeline, coordinates.expert) if expert else (coordinates.pipeline,)
        ranks_by_shard.setdefault(position, {}).setdefault(getattr(coordinates, part), []).append(rank)
    return ranks_by_shard


@pytest.mark.parametrize("receivers", RECEIVERS, ids=str)
@pytest.mark.parametrize("expert", [False, True], ids=["dense", "expert"])
@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS, ids=str)
def test_shards_reach_exactly_the_receivers(world_size, parallel, expert, receivers):
    topology = plan(parallel, world_size)
    requested = receivers if isinstance(receivers, str) else [rank % world_size for rank in receivers]
    receiving = ranks_of(requested, topology)
    taking_part = participants(topology, receiving)
    routes = {rank: route(topology, rank, receiving, expert=expert) for rank in taking_part}
    for shards in holders(topology, expert=expert).values():
        arrived: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
        for number, ranks in shards.items():
            for source in set(ranks) & taking_part:
                assert source in routes[source].across
                for target in routes[source].need_shard:
                    assert target in taking_part
                    assert routes[target].across == routes[source].across  # both know of it
                    arrived[target].add(number)
        complete = set()
        for rank in taking_part:
            for receiver in routes[rank].receivers:
                assert all(arrived[peer] for peer in routes[receiver].parts)
                if set().union(*(arrived[peer] for peer in routes[receiver].parts)) == set(shards):
                    complete.add(receiver)
        assert complete == receiving
        useful = {rank for rank in taking_part if routes[rank].receivers}
        assert {rank for rank, numbers in arrived.items() if numbers} == useful
        assert all(len(numbers) <= 1 for numbers in arrived.values())


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS, ids=str)
def test_whoever_takes_part_takes_part_with_its_whole_pipeline(world_size, parallel):
    topology = plan(parallel, world_size)
    for rank in range(world_size):
        members = participants(topology, [rank])
        assert rank in members
        for member in members:
            assert set(topology.group_of(member, "tensor", "pipeline")) <= members
            if topology.is_moe:
                assert (
                    set(topology.group_of(member, *(axis for axis in EXPERT_AXES if axis != "expert_data"))) <= members
                )


def test_unneeded_replicas_do_not_participate():
    topology = plan(Parallel(tensor=2, pipeline=2), 16)
    assert participants(topology, [0]) == {0, 1, 8, 9}
    assert participants(topology, [0, 2]) == {0, 1, 8, 9, 2, 3, 10, 11}


@pytest.mark.parametrize("receivers", ["mian", [], [2], [-1], ["0"]], ids=str)
def test_receivers_must_be_ranks(receivers):
    with pytest.raises(TopologyError, match="receivers must be"):
        ranks_of(receivers, plan(Parallel(tensor=2), 2))
