"""Section ``collectives``: what HCCL returns, value by value, and that objects travel over Gloo.

``torchrun -m npu_acceptance.collectives JOB`` is one rank, which runs every collective and counts wrong values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megascend
from npu_acceptance.plan import Settings
from npu_acceptance.processes import read_job, run_ranks
from npu_acceptance.records import Measurement, Results, at_most, equal, failed, left_out, noted

RANKS_TIMEOUT_S = 540.0
SIZE = 1003
"""Elements that a rank contributes: no multiple of anything."""
TIMEOUT_S = 120.0
MIB = 2**20
ERROR = "relative error of a sum"
SUM_BOUND, SUM_BOUND_16 = 1e-5, 3e-2


def run(settings: Settings, results: Results) -> None:
    """Run this module on all cards; its first rank writes the results."""
    job = {"results": str(results.path), "simulated": settings.simulated, "quick": settings.quick}
    factor = 2 if settings.simulated else 1
    ended = run_ranks(settings, settings.cards, "collectives", job, RANKS_TIMEOUT_S * factor)
    if problem := ended.problem(RANKS_TIMEOUT_S * factor):
        results.add(failed(f"all collectives on {settings.cards} cards", f"{problem}: {ended.last_error}"))


def run_rank() -> None:
    """Run every check; rank 0 writes the findings of all ranks, check by check."""
    job = read_job()
    runtime = megascend.bootstrap("npu")
    from megascend.distributed.launch import Launch
    from megascend.distributed.objects import gather_objects
    from megascend.distributed.process_groups import initialize
    from megascend.topology.topology import plan

    launch = Launch.from_environment()
    topology = plan(megascend.Parallel(), launch.world_size)
    runtime.load_megatron()
    runtime.configure_topology(topology, TIMEOUT_S)
    groups = initialize(topology, runtime.platform, TIMEOUT_S, launch)
    results = Results(Path(job["results"]))
    checks = Checks(groups.device, launch.rank, launch.world_size, job["simulated"])
    try:
        for name, check in checks.all(job["quick"]):
            problem, found = "", 0.0
            try:
                found = check()
            except (RuntimeError, TypeError, ValueError) as error:  # what HCCL and torch raise: on every rank alike
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            answers = gather_objects((found, problem), "world", groups, f"findings of {name}")
            if launch.rank == 0:
                results.add(verdict(name, answers))
        for measurement in object_checks(launch.rank, launch.world_size, checks.device):
            if launch.rank == 0:
                results.add(measurement)
        for measurement in checks.bandwidth():
            if launch.rank == 0:
                results.add(measurement)
    finally:
        groups.destroy()


def verdict(name: str, answers: list[tuple[float, str]]) -> Measurement:
    """What all ranks found, as one measurement: the worst of them."""
    problems = {rank: problem for rank, (_, problem) in enumerate(answers) if problem}
    if problems:
        rank, problem = next(iter(problems.items()))
        return failed(name, f"rank {rank}: {problem}")
    if name.endswith(ERROR):
        bound = SUM_BOUND if "fp32" in name else SUM_BOUND_16
        return at_most(name, max(found for found, _ in answers), bound)
    return at_most(name, sum(found for found, _ in answers), 0, "wrong elements")


class Checks:
    """Every check returns how many of this rank's elements are wrong (of a sum of random numbers: its error).

    Whole numbers small enough to be exact in every type: a sum has one right result.
    """

    def __init__(self, device: Any, rank: int, size: int, simulated: bool) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.device, self.rank, self.size, self.simulated = device, rank, size, simulated

    def all(self, quick: bool) -> Iterator[tuple[str, Callable[[], float]]]:
        """Names and checks, the same on every rank."""
        types = {"bf16": self.torch.bfloat16, "fp32": self.torch.float32, "int64": self.torch.int64}
        collectives = (
            self.all_reduce,
            self.all_reduce_maximum,
            self.all_gather,
            self.all_gather_into_tensor,
            self.reduce_scatter,
            self.all_to_all,
            self.all_to_all_uneven,
            self.broadcast,
            self.send_and_receive,
        )
        for kind, dtype in types.items():
            for collective in collectives:
                name = (
                    collective.__name__.replace("_", " ")
                    if collective.__name__.startswith("send")
                    else collective.__name__
                )
                yield f"{name}, {kind}", lambda collective=collective, dtype=dtype: collective(dtype)
            if quick:
                continue
            if dtype.is_floating_point:
                yield f"all_reduce of random numbers, {kind}, {ERROR}", lambda dtype=dtype: self.random_sum(dtype)
        if self.size >= 4:
            yield "all_reduce in halves of the world, fp32", self.halves
        yield "barrier and an all_reduce that is waited for, fp32", self.waited_for

    def contribution(self, rank: int, dtype: Any, count: int = SIZE) -> Any:
        """What a rank puts in: small whole numbers that differ between ranks and places."""
        return (self.torch.arange(count) % 5 + rank + 1).to(dtype)

    def wrong(self, found: Any, expected: Any) -> float:
        """Elements that differ."""
        found = found.cpu()
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return float(max(found.numel(), 1))
        return float((found != expected).sum())

    def mine(self, dtype: Any, count: int = SIZE) -> Any:
        return self.contribution(self.rank, dtype, count).to(self.device)

    def summed(self, dtype: Any, count: int = SIZE) -> Any:
        total = sum(self.contribution(rank, self.torch.int64, count) for rank in range(self.size))
        return self.torch.as_tensor(total).to(dtype)

    def all_reduce(self, dtype: Any) -> float:
        found = self.mine(dtype)
        self.dist.all_reduce(found)
        return self.wrong(found, self.summed(dtype))

    def all_reduce_maximum(self, dtype: Any) -> float:
        found = self.mine(dtype)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return self.wrong(found, self.contribution(self.size - 1, dtype))

    def all_gather(self, dtype: Any) -> float:
        found = [self.torch.zeros(SIZE, dtype=dtype, device=self.device) for _ in range(self.size)]
        self.dist.all_gather(found, self.mine(dtype))
        return sum(self.wrong(one, self.contribution(rank, dtype)) for rank, one in enumerate(found))

    def all_gather_into_tensor(self, dtype: Any) -> float:
        found = self.torch.zeros(self.size * SIZE, dtype=dtype, device=self.device)
        self.dist.all_gather_into_tensor(found, self.mine(dtype))
        return self.wrong(found, self.torch.cat([self.contribution(rank, dtype) for rank in range(self.size)]))

    def reduce_scatter(self, dtype: Any) -> float:
        found = self.torch.zeros(SIZE, dtype=dtype, device=self.device)
        self.dist.reduce_scatter_tensor(found, self.mine(dtype, self.size * SIZE))
        return self.wrong(found, self.summed(dtype, self.size * SIZE)[self.rank * SIZE : (self.rank + 1) * SIZE])

    def all_to_all(self, dtype: Any) -> float:
        found = self.torch.zeros(self.size * SIZE, dtype=dtype, device=self.device)
        self.dist.all_to_all_single(found, self.mine(dtype, self.size * SIZE))
        pieces = [self.contribution(rank, dtype, self.size * SIZE) for rank in range(self.size)]
        own = slice(self.rank * SIZE, (self.rank + 1) * SIZE)
        return self.wrong(found, self.torch.cat([piece[own] for piece in pieces]))

    def all_to_all_uneven(self, dtype: Any) -> float:
        """Rank i sends (3 i + 5 j) mod 7 elements to rank j, which may be none."""

        def sent(source: int, target: int) -> int:
            return (3 * source + 5 * target) % 7

        going = [sent(self.rank, other) for other in range(self.size)]
        coming = [sent(other, self.rank) for other in range(self.size)]
        found = self.torch.zeros(sum(coming), dtype=dtype, device=self.device)
        self.dist.all_to_all_single(found, self.mine(dtype, sum(going)), coming, going)
        expected = []
        for other in range(self.size):
            splits = [sent(other, target) for target in range(self.size)]
            expected.append(self.contribution(other, dtype, sum(splits)).split(splits)[self.rank])
        return self.wrong(found, self.torch.cat(expected))

    def broadcast(self, dtype: Any) -> float:
        found = self.mine(dtype)
        self.dist.broadcast(found, src=self.size - 1)
        return self.wrong(found, self.contribution(self.size - 1, dtype))

    def send_and_receive(self, dtype: Any) -> float:
        """To the next rank, from the one before, both at once."""
        if self.size == 1:
            return 0.0
        found = self.torch.zeros(SIZE, dtype=dtype, device=self.device)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        both = [
            self.dist.P2POp(self.dist.isend, self.mine(dtype), after),
            self.dist.P2POp(self.dist.irecv, found, before),
        ]
        for work in self.dist.batch_isend_irecv(both):
            work.wait()
        return self.wrong(found, self.contribution(before, dtype))

    def random_sum(self, dtype: Any) -> float:
        drawn = [
            self.torch.randn(SIZE, generator=self.torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(self.size)
        ]
        found = drawn[self.rank].to(self.device)
        self.dist.all_reduce(found)
        expected = self.torch.stack([one.double() for one in drawn]).sum(0)
        return float((found.cpu().double() - expected).abs().max() / expected.abs().max())

    def halves(self) -> float:
        """Every rank makes both groups, and uses its own."""
        middle = self.size // 2
        halves = [list(range(middle)), list(range(middle, self.size))]
        groups = [self.dist.new_group(half) for half in halves]
        own = int(self.rank >= middle)
        found = self.mine(self.torch.float32)
        self.dist.all_reduce(found, group=groups[own])
        expected = sum(self.contribution(rank, self.torch.float32) for rank in halves[own])
        self.dist.destroy_process_group(groups[own])
        return self.wrong(found, expected)

    def waited_for(self) -> float:
        self.dist.barrier()
        found = self.mine(self.torch.float32)
        work = self.dist.all_reduce(found, async_op=True)
        work.wait()
        return self.wrong(found, self.summed(self.torch.float32))

    def bandwidth(self) -> Iterator[Measurement]:
        """Of an all_reduce, as the field counts it: bytes of the tensor a second."""
        if self.size == 1:
            yield left_out("bandwidth of all_reduce", "there is one card")
            return
        megabytes = 4 if self.simulated else 256
        data = self.torch.ones(megabytes * MIB // 4, dtype=self.torch.float32, device=self.device)
        times = []
        for _ in range(5):
            self.torch.npu.synchronize()
            start = time.perf_counter()
            self.dist.all_reduce(data)
            self.torch.npu.synchronize()
            times.append(time.perf_counter() - start)
            data.fill_(1.0)
        yield noted(f"all_reduce of {megabytes} MiB", megabytes / 1024 / min(times), "GiB/s")


def object_checks(rank: int, size: int, device: Any) -> Iterator[Measurement]:
    """Upstream's object collectives on the default group, which is on HCCL: megascend sends them over Gloo."""
    import torch.distributed as dist

    sent = {"rank": rank, "text": "x" * (rank + 1)}
    found: list[Any] = [None] * size
    dist.all_gather_object(found, sent)
    yield equal("all_gather_object", found, [{"rank": each, "text": "x" * (each + 1)} for each in range(size)])
    shared = [sent if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    yield equal("broadcast_object_list", shared, [{"rank": 0, "text": "x"}])
    yield equal("the default group's backend", dist.get_backend(), "hccl")


if __name__ == "__main__":
    run_rank()
