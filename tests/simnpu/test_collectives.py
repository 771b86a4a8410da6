"""Every collective of the simulated hccl on forked ranks, against values worked out by hand.

Rank r of w contributes values made of r, so that a wrong order, a missing rank or a wrong split shows.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hccl_ranks import on_ranks
from torch.distributed.distributed_c10d import _coalescing_manager

from megascend.errors import DistributedTestError

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

from torch.distributed import all_gather_object as copied_before_registration  # noqa: E402

EXACT = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def npu(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def test_names() -> None:
    def body(rank: int, world: int) -> Any:
        group = dist.new_group([0, 1], backend="hccl")
        return dist.get_backend(), dist.get_backend(group) if rank < 2 else None, dist.is_initialized()

    assert on_ranks(body) == [("hccl", "hccl", True)] * 2 + [("hccl", None, True)]


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce(world: int) -> None:
    operations = {"SUM": sum, "MAX": max, "MIN": min}

    def body(rank: int, world: int) -> Any:
        results = {}
        for dtype in EXACT:
            for name in operations:
                tensor = npu([rank + 1, 3 * rank], dtype)
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
                results[dtype, name] = tensor.tolist()
        mean = npu([4.0 * rank])
        work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
        work.wait()
        flags = npu([rank == 1, False], torch.bool)
        dist.all_reduce(flags)
        return results, mean.item(), work.is_completed(), flags.tolist()

    for results, mean, completed, flags in on_ranks(body, world):
        for (_, name), value in results.items():
            columns = ([r + 1 for r in range(world)], [3 * r for r in range(world)])
            assert value == [operations[name](column) for column in columns]
        assert (mean, completed, flags) == (2.0 * (world - 1), True, [True, False])


NO_PRODUCT = (torch.bfloat16, torch.int16)


def test_what_hccl_does_not_reduce_is_refused() -> None:
    def message(function: Callable[[], Any]) -> str:
        with pytest.raises(RuntimeError) as raised:
            function()
        return str(raised.value)

    def body(rank: int, world: int) -> Any:
        double, odd = torch.ones(4, dtype=torch.float64, device="npu"), torch.ones(4, 4, device="npu").t()
        gathered = torch.empty(4 * world, dtype=torch.float64, device="npu")
        dist.all_gather_into_tensor(gathered, double * rank)
        return gathered[::4].tolist(), [
            message(lambda: dist.all_reduce(double)),
            message(lambda: dist.reduce_scatter_tensor(double[:2], double)),
            message(lambda: dist.all_reduce(npu([1], torch.int32), op=dist.ReduceOp.BAND)),
            *(message(lambda k=k: dist.all_reduce(npu([1], k), op=dist.ReduceOp.PRODUCT)) for k in NO_PRODUCT),
            message(lambda: dist.all_reduce(odd)),
            message(lambda: dist.broadcast(torch.ones(1, dtype=torch.float8_e4m3fnuz, device="npu"), 0)),
            message(lambda: dist.all_reduce(torch.ones(1))),
            message(lambda: dist.recv(npu([1.0]))),
        ]

    for gathered, messages in on_ranks(body, 2):
        assert gathered == [0, 1]  # moving float64 is allowed
        assert messages == [
            "HCCL allreduce: Unsupported data type at::kDouble",
            "HCCL _reduce_scatter_base: Unsupported data type at::kDouble",
            "Cannot use ReduceOp.BAND with HCCL",
            "HCCL allreduce: ReduceOp.PRODUCT does not support torch.bfloat16 on Atlas A2",
            "HCCL allreduce: ReduceOp.PRODUCT does not support torch.int16 on Atlas A2",
            "Tensors must be contiguous",
            "Unsupported data type for HCCL process group",
            "No backend type associated with device type cpu",
            "ProcessGroupHCCL does not support recv",
        ]


def test_all_gather() -> None:
    def body(rank: int, world: int) -> Any:
        even = [torch.empty(2, device="npu") for _ in range(world)]
        dist.all_gather(even, npu([rank, 10 * rank]))
        uneven = [torch.empty(r + 1, 2, dtype=torch.bfloat16, device="npu") for r in range(world)]
        dist.all_gather(uneven, torch.full((rank + 1, 2), rank, dtype=torch.bfloat16, device="npu"))
        single = torch.empty(2 * world, dtype=torch.bool, device="npu")
        dist.all_gather_into_tensor(single, npu([rank == 1, True], torch.bool))
        return [t.tolist() for t in even], [t.tolist() for t in uneven], single.tolist()

    for even, uneven, single in on_ranks(body, 4):
        assert even == [[r, 10 * r] for r in range(4)]
        assert uneven == [[[r, r]] * (r + 1) for r in range(4)]
        assert single == [False, True, True, True, False, True, False, True]


def test_reduce_scatter() -> None:
    def body(rank: int, world: int) -> Any:
        single, source = torch.empty(2, device="npu"), torch.arange(2.0 * world, device="npu") * (rank + 1)
        dist.reduce_scatter_tensor(single, source)
        mean = torch.empty(2, device="npu")
        dist.reduce_scatter_tensor(mean, source, op=dist.ReduceOp.AVG)
        uneven = torch.empty(rank + 1, device="npu")
        dist.reduce_scatter(uneven, [torch.full((r + 1,), float(r), device="npu") for r in range(world)])
        return single.tolist(), mean.tolist(), uneven.tolist(), source.tolist()

    for rank, (single, mean, uneven, source) in enumerate(on_ranks(body, 4)):
        assert single == [10 * (2 * rank), 10 * (2 * rank + 1)]
        assert mean == [2.5 * (2 * rank), 2.5 * (2 * rank + 1)]
        assert uneven == [4.0 * rank] * (rank + 1)
        assert source == [float(i * (rank + 1)) for i in range(8)]  # inputs are left alone


@pytest.mark.parametrize("world", [3, 5])
def test_world_sizes_that_a_card_does_not_have(world: int) -> None:
    def body(rank: int, world: int) -> Any:
        parts, whole = [npu([0.0]) for _ in range(world)], torch.empty(world, device="npu")
        messages = []
        for call in (
            lambda: dist.reduce_scatter(npu([0.0]), parts),
            lambda: dist.reduce_scatter_tensor(npu([0.0]), whole),
            lambda: dist.all_gather_into_tensor(whole, npu([0.0])),
        ):
            with pytest.raises(RuntimeError, match=f"does not support a world size of {world} on Atlas A2") as raised:
                call()
            messages.append(str(raised.value).split()[1])
        dist.all_gather(parts, npu([float(rank)]))  # has no such limit
        return [*messages, [part.item() for part in parts]]

    names = ["reduce_scatter", "reduce_scatter_base", "allgather_base"]
    assert on_ranks(body, world) == [[*names, list(range(world))]] * world


def test_two_ranks_on_one_card_are_refused() -> None:
    def body(rank: int, world: int) -> Any:
        with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] of the hccl group of ranks \[0, 1, 2\] share a card"):
            dist.all_reduce(torch.ones(1, device=f"npu:{rank % 2}"))

    on_ranks(body)


def test_all_to_all() -> None:
    def body(rank: int, world: int) -> Any:
        even = torch.empty(world, dtype=torch.int64, device="npu")
        dist.all_to_all_single(even, torch.arange(world, device="npu") + 10 * rank)
        splits = [r + 1 for r in range(world)]  # to rank r go r + 1 rows
        uneven = torch.empty((rank + 1) * world, 2, dtype=torch.bfloat16, device="npu")
        rows = torch.full((sum(splits), 2), rank, dtype=torch.bfloat16, device="npu")
        dist.all_to_all_single(uneven, rows, [rank + 1] * world, splits)
        no_rows = torch.empty(0, 2, device="npu")
        dist.all_to_all_single(no_rows, torch.empty(0, 2, device="npu"), [0] * world, [0] * world)
        outputs = [torch.empty(1, device="npu") for _ in range(world)]
        dist.all_to_all(outputs, [npu([10.0 * rank + r]) for r in range(world)])
        return even.tolist(), uneven[:, 1].tolist(), [t.item() for t in outputs]

    for rank, (even, uneven, list_outputs) in enumerate(on_ranks(body)):
        assert even == [10 * r + rank for r in range(3)]
        assert uneven == [r for r in range(3) for _ in range(rank + 1)]
        assert list_outputs == [10 * r + rank for r in range(3)]


def test_one_to_all_and_all_to_one() -> None:
    def body(rank: int, world: int) -> Any:
        broadcast, reduced, scattered = npu([rank], torch.int16), npu([rank + 1.0]), torch.empty(1, device="npu")
        dist.broadcast(broadcast, 1)
        dist.reduce(reduced, 2)
        gathered = [torch.empty(1, device="npu") for _ in range(world)] if rank == 0 else None
        dist.gather(npu([float(rank)]), gathered, 0)
        dist.scatter(scattered, [npu([5.0 * r]) for r in range(world)] if rank == 0 else None, 0)
        dist.barrier()
        return broadcast.item(), reduced.item(), scattered.item(), gathered and [t.item() for t in gathered]

    results = on_ranks(body)
    assert [result[0] for result in results] == [1, 1, 1]
    assert [result[1] for result in results] == [1, 2, 6]
    assert [result[2] for result in results] == [0, 5, 10]
    assert [result[3] for result in results] == [[0, 1, 2], None, None]


def test_point_to_point_and_memory_freed_before_it_is_sent() -> None:
    size = 1 << 20  # too large for the sockets' buffers: still being sent when the tensor is dropped

    def body(rank: int, world: int) -> Any:
        after, before = (rank + 1) % world, (rank - 1) % world
        received, small = torch.empty(size, device="npu"), torch.empty(1, dtype=torch.bfloat16, device="npu")
        sending = dist.isend(torch.full((size,), rank + 1.0, device="npu"), after)
        gc.collect()
        overwriting = [torch.zeros(size, device="npu") for _ in range(4)]
        dist.irecv(received, before).wait()
        sending.wait()
        operations = [
            dist.P2POp(dist.isend, npu([rank], torch.bfloat16), before),
            dist.P2POp(dist.irecv, small, after),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.unique().tolist(), small.item(), len(overwriting)

    assert on_ranks(body) == [([(r - 1) % 3 + 1.0], (r + 1) % 3, 4) for r in range(3)]


def test_coalesced() -> None:
    def body(rank: int, world: int) -> Any:
        a, b, gathered = npu([1.0, rank]), npu([2.0]), [torch.empty(world, device="npu") for _ in range(2)]
        with _coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(a)
            dist.all_reduce(b)
        manager.wait()
        with _coalescing_manager():
            for i, output in enumerate(gathered):
                dist.all_gather_into_tensor(output, npu([rank + 10.0 * i]))
        part = torch.empty(1, device="npu")
        with _coalescing_manager():
            dist.reduce_scatter_tensor(part, torch.arange(float(world), device="npu"))
        with _coalescing_manager(device=torch.device("npu")):
            dist.all_reduce(b)
        return a.tolist(), b.item(), [t.tolist() for t in gathered], part.item()

    for rank, result in enumerate(on_ranks(body, 4)):
        assert result == ([4, 6], 32, [[0, 1, 2, 3], [10, 11, 12, 13]], 4 * rank)


def test_a_later_collective_sees_what_an_earlier_one_wrote() -> None:
    def body(rank: int, world: int) -> Any:
        tensor, gathered = npu([rank + 1.0]), torch.empty(world, device="npu")
        works = [
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True),
            dist.all_reduce(tensor, async_op=True),
            dist.all_gather_into_tensor(gathered, tensor, async_op=True),
        ]
        works[-1].wait()
        return gathered.tolist()

    assert on_ranks(body, 4) == [[10] * 4] * 4


OBJECTS: dict[str, Callable[[int], Any]] = {
    "all_gather_object": lambda world: dist.all_gather_object([None] * world, 1),
    "copied before": lambda world: copied_before_registration([None] * world, 1),
    "gather_object": lambda world: dist.gather_object(1, [None] * world if dist.get_rank() == 0 else None),
    "broadcast_object_list": lambda world: dist.broadcast_object_list([1]),
    "broadcast to a device": lambda world: dist.broadcast_object_list([1], device=torch.device("npu")),
    "scatter_object_list": lambda world: dist.scatter_object_list([None], [1] * world),
}


def test_object_collectives_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMNPU_OBJECTS", "refuse")

    def body(rank: int, world: int) -> Any:
        for call in OBJECTS.values():
            with pytest.raises(RuntimeError, match=r"refuses object collectives .*A Gloo group"):
                call(world)
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, rank, group=dist.new_group(backend="gloo"))
        return objects

    assert on_ranks(body) == [[0, 1, 2]] * 3


def test_object_collectives_work_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMNPU_OBJECTS", raising=False)

    def body(rank: int, world: int) -> Any:
        everybody, gathered, scattered, objects = [None] * world, [None] * world, [None], [{"from": rank}]
        with pytest.warns(RuntimeWarning, match=r"all_gather_object on an hccl group \(rank .*device memory"):
            dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank})
        with warnings.catch_warnings(record=True) as repeated:
            copied_before_registration(everybody, {"rank": rank, "text": "x" * rank}, group=dist.new_group([0, 1, 2]))
        dist.gather_object(rank, gathered if rank == 0 else None)
        dist.broadcast_object_list(objects, src=1)
        dist.scatter_object_list(scattered, [(r, None) for r in range(world)] if rank == 2 else None, src=2)
        return everybody, len(repeated), gathered, objects, scattered

    for rank, (everybody, warned_again, gathered, sent_objects, scattered) in enumerate(on_ranks(body)):
        assert everybody == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert warned_again == 0
        assert gathered == ([0, 1, 2] if rank == 0 else [None] * 3)
        assert (sent_objects, scattered) == ([{"from": 1}], [(rank, None)])


def test_a_group_of_both_backends() -> None:
    def body(rank: int, world: int) -> Any:
        group = dist.new_group(backend="cpu:gloo,npu:hccl")
        on_cpu, on_npu, objects = torch.ones(1), npu([1.0]), [None] * world
        dist.all_reduce(on_cpu, group=group)
        dist.all_reduce(on_npu, group=group)
        dist.all_gather_object(objects, rank, group=group)
        return on_cpu.item(), on_npu.item(), objects

    assert on_ranks(body, 2) == [(2, 2, [0, 1])] * 2


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_a_collective_alone_ends_at_the_timeout(op: str) -> None:
    """Also check that the other rank of its group gets no result before the time-out."""

    def body(rank: int, world: int) -> bool:
        store = dist.distributed_c10d._get_default_store()
        group = dist.new_group(timeout=timedelta(seconds=1))
        if rank == 1:
            store.wait(["ended"], timedelta(seconds=50))
            return True
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(npu([1.0]), op=getattr(dist.ReduceOp, op), group=group)
        store.set("ended", b"")
        return True

    assert on_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_a_rank_that_dies_is_an_error_of_wait(op: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        dist.barrier()
        if rank == 1:
            os._exit(3)
        try:
            dist.all_reduce(npu([1.0]), op=getattr(dist.ReduceOp, op), async_op=True).wait()
        except RuntimeError as error:
            (tmp_path / "error").write_text(str(error))

    with pytest.raises(DistributedTestError, match="rank 1 exited with code 3"):
        on_ranks(body, 2)
    assert re.search(r"closed by peer|reset by peer", (tmp_path / "error").read_text())
