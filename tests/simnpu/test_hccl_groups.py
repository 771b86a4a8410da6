"""Groups of the simulated hccl: they are made without waiting for anybody and belong to their ranks, as HCCL's do."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hccl_ranks import on_ranks

from simnpu import hccl_group
from simnpu.errors import ConfigError

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def total(rank: int, group: Any = None) -> float:
    """10^rank, summed over the group: its digits are the ranks that took part."""
    tensor = torch.tensor([10.0**rank], device="npu")
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_each_rank_makes_only_its_own_group() -> None:
    def body(rank: int, world: int) -> Any:
        pair = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3])
        pair_total = total(rank, pair)
        second_pair = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3])  # the same ranks, and still another group
        return pair_total, total(rank, second_pair), dist.get_process_group_ranks(second_pair), total(rank)

    even, odd = (101, 101, [0, 2], 1111), (1010, 1010, [1, 3], 1111)
    assert on_ranks(body, 4) == [even, odd, even, odd]


def test_making_a_group_waits_for_nobody() -> None:
    def body(rank: int, world: int) -> Any:
        if rank == 0:
            start = time.monotonic()
            group, singleton = dist.new_group([0, 1]), dist.new_group([0])
            only_mine = total(rank, singleton)
            dist.distributed_c10d._get_default_store().set("made", b"1")  # rank 1 has made nothing yet
            assert time.monotonic() - start < 15
        else:
            dist.distributed_c10d._get_default_store().wait(["made"], timedelta(seconds=20))
            group, only_mine = dist.new_group([0, 1]), 0
        return total(rank, group), only_mine

    assert on_ranks(body, 2) == [(11, 1), (11, 0)]


def test_groups_of_groups_in_different_orders() -> None:
    def body(rank: int, world: int) -> Any:
        if rank == 3:
            return []
        groups = {ranks: dist.new_group(list(ranks)) for ranks in ((2, 1, 0), (0, 1), (1, 2)) if rank in ranks}
        order = sorted(groups, key=len, reverse=True)
        return [total(rank, groups[ranks]) for ranks in order]

    assert on_ranks(body, 4) == [[111, 11], [111, 11, 110], [111, 110], []]


def test_local_synchronization_and_named_subgroups() -> None:
    def body(rank: int, world: int) -> Any:
        ranks = [0, 1] if rank < 2 else [2, 3]
        local = dist.new_group(ranks, use_local_synchronization=True)
        halves, _ = dist.new_subgroups(2)
        mesh = dist.init_device_mesh("npu", (2, 2), mesh_dim_names=("a", "b"))
        return (
            total(rank, local),
            total(rank, halves),
            total(rank, mesh["a"].get_group()),
            total(rank, mesh.get_group("b")),
        )

    low, high = (11, 11), (1100, 1100)
    assert on_ranks(body, 4) == [(*low, 101, 11), (*low, 1010, 11), (*high, 101, 1100), (*high, 1010, 1100)]


def test_send_between_two_of_four_needs_no_other() -> None:
    def body(rank: int, world: int) -> Any:
        tensor = torch.tensor([float(rank)], device="npu")
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        return tensor.item()

    assert on_ranks(body, 4) == [0, 0, 2, 3]


def test_destroyed_and_made_again() -> None:
    def body(rank: int, world: int) -> Any:
        sums = []
        for _ in range(2):
            group = dist.new_group([0, 1])
            sums.append(total(rank, group))
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        store = dist.FileStore(os.environ["MEGASCEND_STORE"], world)
        dist.init_process_group("hccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
        return [*sums, total(rank), total(rank, dist.new_group([0, 1]))]

    assert on_ranks(body, 2) == [[11] * 4] * 2


@pytest.mark.parametrize("seconds", ["119", "7201", "1", "x"])
def test_connect_timeout_is_one_that_hccl_takes(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", seconds)
    with pytest.raises(ConfigError, match=f"HCCL_CONNECT_TIMEOUT='{seconds}': expected 120 to 7200"):
        hccl_group.connect_timeout()


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(rank: int, world: int) -> str:
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["0", "2"], timedelta(seconds=20))
            return ""
        with pytest.raises(RuntimeError, match="timed out after 1 s") as raised:
            total(rank, group)
        store.set(str(rank), b"")
        return str(raised.value)

    messages = on_ranks(body, 3)
    for rank in (0, 2):
        begin = f"rank {rank} is at the first collective of the hccl group of ranks [0, 1, 2], and of these ["
        assert begin in messages[rank]
        assert (
            "1" in messages[rank].partition(begin)[2].partition("]")[0]
        )  # on a busy machine the other one may be late, too
        assert "HCCL_CONNECT_TIMEOUT" in messages[rank]


def test_aborted_communicator_ends_the_wait_of_its_rank() -> None:
    """torch_npu's ``abort_hccl_comm(reason)``; ``abort()`` is c10d's, and does nothing."""

    def body(rank: int, world: int) -> Any:
        assert total(rank) == 111
        store = dist.distributed_c10d._get_default_store()
        if rank > 0:  # never joins the collective
            store.wait(["ended"], timedelta(seconds=50))
            return True
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
        work = dist.all_reduce(torch.ones(4, device="npu"), async_op=True)
        backend.abort()
        assert not work.is_completed()
        with pytest.raises(TypeError):
            backend.abort_hccl_comm()
        backend.abort_hccl_comm("reinit")
        with pytest.raises(RuntimeError, match=r"closed|closure|aborted|[Tt]imed out"):
            work.wait()
        store.set("ended", b"")
        return True

    assert on_ranks(body, 3, timeout_s=3600) == [True] * 3


def test_split_group_is_refused_as_by_torch_npu() -> None:
    def body(rank: int, world: int) -> str:
        with pytest.raises(RuntimeError, match="does not support splitting") as raised:
            dist.split_group(split_ranks=[[0], [1]])
        assert total(rank, dist.new_group([0, 1])) == 11
        return str(raised.value)

    on_ranks(body, 2, device_id=torch.device("npu:0"))
