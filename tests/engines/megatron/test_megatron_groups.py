"""Megatron's process groups match the topology, exist once at a time, and are gone after destruction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascend.config import Parallel
from megascend.errors import ProcessGroupError
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.distributed.objects import all_reduce_numbers
from megascend.runtime.distributed.process_groups import OBJECT_GROUPS, ProcessGroups, initialize
from megascend.runtime.topology.topology import GROUP_AXES, plan
from megascend.testing import run_distributed


def open_groups(runtime: Runtime, world: int, **parallel: Any) -> ProcessGroups:
    from megascend.engines.megatron.groups import MegatronGroups

    return initialize(plan(Parallel(**parallel), world), runtime.platform, 30, factory=MegatronGroups())


@pytest.mark.parametrize("parallel", [{"tensor": 2, "pipeline": 2}, {"context": 2, "expert": 4}])
def test_every_group_reduces_over_the_ranks_of_the_topology(
    megatron_imported: Runtime, parallel: dict[str, Any]
) -> None:
    def sums() -> dict[str, float]:
        from megatron.core import parallel_state

        groups = open_groups(megatron_imported, 4, **parallel)
        assert groups.device_group("tp") is parallel_state.get_tensor_model_parallel_group()
        on_gloo = [
            parallel_state.get_data_parallel_group_gloo(with_context_parallel=context) for context in (False, True)
        ]
        assert groups.channel("dp_cp").group in on_gloo, "Megatron's own, of the same ranks"
        totals = {}
        for name in GROUP_AXES:
            value = torch.tensor(2.0**groups.rank)
            dist.all_reduce(value, group=groups.device_group(name))
            totals[name] = value.item()
            if name in OBJECT_GROUPS:
                assert all_reduce_numbers([2.0**groups.rank], name, groups) == [totals[name]]
                assert groups.channel(name).group is not groups.device_group(name)
        groups.destroy()
        assert not parallel_state.is_initialized()
        assert not dist.is_initialized()
        return totals

    topology = plan(Parallel(**parallel), 4)
    for rank, totals in enumerate(run_distributed(sums, 4, init=False)):
        for name, total in totals.items():
            assert total == sum(2.0**member for member in topology.group_of(rank, *GROUP_AXES[name])), name


def test_a_second_set_is_refused_and_leaves_the_first_as_it_is(
    megatron_imported: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGASCEND_STORE"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        groups = open_groups(megatron_imported, 1)
        try:
            with pytest.raises(ProcessGroupError, match="exist already"):
                open_groups(megatron_imported, 1)
            assert parallel_state.is_initialized()
            assert groups.device_group("tp") is parallel_state.get_tensor_model_parallel_group()
        finally:
            groups.destroy()
        assert not parallel_state.is_initialized()


def test_axes_of_size_one_share_a_single_rank_group(megatron_imported: Runtime) -> None:
    def single_rank_groups() -> tuple[int, list[bool], float]:
        groups = open_groups(megatron_imported, 2)
        shared = [groups.device_group(name) for name in ("tp", "pp", "cp", "mp", "ep")]
        total = torch.tensor(1.0 + groups.rank)
        dist.all_reduce(total, group=shared[0])
        count = len(dist.distributed_c10d._world.pg_map)
        groups.destroy()
        return count, [group is shared[0] for group in shared], total.item()

    results = run_distributed(single_rank_groups, 2, init=False)
    assert [total for _, _, total in results] == [1.0, 2.0]
    for count, same, _ in results:
        assert all(same)
        assert count <= 17


def test_megatron_laying_out_ranks_differently_is_noticed(
    megatron_imported: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    original = parallel_state.initialize_model_parallel

    def pipeline_first(**settings: Any) -> None:
        original(**(settings | {"order": "pp-dp-cp-ep-tp"}))

    monkeypatch.setattr(parallel_state, "initialize_model_parallel", pipeline_first)

    def start() -> None:
        with pytest.raises(ProcessGroupError, match=r"MegatronGroups created group tp with ranks \[\d, \d\], the"):
            open_groups(megatron_imported, 4, tensor=2)
        assert not dist.is_initialized()
        assert not parallel_state.is_initialized()

    run_distributed(start, 4, init=False)


@pytest.mark.usefixtures("megatron_imported")
def test_only_groups_of_the_same_rank_and_kind_are_shared() -> None:
    from megascend.engines.megatron.groups import sharing

    groups: list[object] = []

    def new_group(*args: Any, **options: Any) -> object:
        groups.append(object())
        return groups[-1]

    shared = sharing(new_group)
    first = shared([3], timeout=30, backend="nccl", pg_options=object(), group_desc="TP")
    assert shared(ranks=[3], timeout=30, backend="nccl", pg_options=None, group_desc="PP") is first
    distinct = [
        shared([2], 30, "nccl"),
        shared([3], 30, "gloo"),
        shared([3], 40, "nccl"),
        shared([3], 30, "nccl", use_local_synchronization=True),
        *(shared([2, 3], 30, "nccl") for _ in range(2)),
        *(shared(None, 30, "nccl") for _ in range(2)),
    ]
    assert len({id(group) for group in (first, *distinct)}) == len(groups) == 9
