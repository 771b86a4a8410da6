"""Section ``collectives``: the values that HCCL returns, and object collectives over Gloo.

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
    outcome = run_ranks(settings, settings.cards, "collectives", job, RANKS_TIMEOUT_S * factor)
    if problem := outcome.problem(RANKS_TIMEOUT_S * factor):
        results.add(failed(f"all collectives on {settings.cards} cards", f"{problem}: {outcome.last_error}"))


def run_rank() -> None:
    """Run every check; rank 0 writes the findings of all ranks, check by check."""
    job = read_job()
    runtime = megascend.bootstrap("npu")
    from megascend.runtime.distributed.launch import Launch
    from megascend.runtime.distributed.objects import gather_objects
    from megascend.runtime.distributed.process_groups import initialize
    from megascend.runtime.topology.topology import plan

    launch = Launch.from_environment()
    topology = plan(megascend.Parallel(), launch.world_size)
    runtime.load_megatron()
    runtime.configure_topology(topology, TIMEOUT_S)
    groups = initialize(topology, runtime.platform, TIMEOUT_S, launch)
    results = Results(Path(job["results"]))
    checks = Checks(groups.device, launch.rank, launch.world_size, job["simulated"])
    try:
        for name, check in checks.all(job["quick"]):
            problem, value = "", 0.0
            try:
                value = check()
            except (RuntimeError, TypeError, ValueError) as error:  # HCCL and torch raise these on every rank
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            answers = gather_objects((value, problem), "world", groups, f"findings of {name}")
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
    """Combine the results of all ranks into one measurement: the largest error, or the sum of wrong elements."""
    problems = {rank: problem for rank, (_, problem) in enumerate(answers) if problem}
    if problems:
        rank, problem = next(iter(problems.items()))
        return failed(name, f"rank {rank}: {problem}")
    if name.endswith(ERROR):
        bound = SUM_BOUND if "fp32" in name else SUM_BOUND_16
        return at_most(name, max(value for value, _ in answers), bound)
    return at_most(name, sum(value for value, _ in answers), 0, "wrong elements")


class Checks:
    """Collective checks; each returns the number of wrong elements on this rank (the error, for a sum of random numbers).

    The inputs are integers that every dtype represents exactly, so that a sum has one correct result.
    """

    def __init__(self, device: Any, rank: int, size: int, simulated: bool) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.device, self.rank, self.size, self.simulated = device, rank, size, simulated

    def all(self, quick: bool) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield names and checks in the same order on every rank."""
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
        yield "barrier and an all_reduce that is waited for, fp32", self.barrier_and_wait

    def contribution(self, rank: int, dtype: Any, count: int = SIZE) -> Any:
        """Return a rank's input: small integers that differ between ranks and positions."""
        return (self.torch.arange(count) % 5 + rank + 1).to(dtype)

    def count_wrong(self, output: Any, expected: Any) -> float:
        """Return the number of elements that differ."""
        output = output.cpu()
        if output.shape != expected.shape or output.dtype != expected.dtype:
            return float(max(output.numel(), 1))
        return float((output != expected).sum())

    def local_input(self, dtype: Any, count: int = SIZE) -> Any:
        return self.contribution(self.rank, dtype, count).to(self.device)

    def expected_sum(self, dtype: Any, count: int = SIZE) -> Any:
        total = sum(self.contribution(rank, self.torch.int64, count) for rank in range(self.size))
        return self.torch.as_tensor(total).to(dtype)

    def all_reduce(self, dtype: Any) -> float:
        output = self.local_input(dtype)
        self.dist.all_reduce(output)
        return self.count_wrong(output, self.expected_sum(dtype))

    def all_reduce_maximum(self, dtype: Any) -> float:
        output = self.local_input(dtype)
        self.dist.all_reduce(output, op=self.dist.ReduceOp.MAX)
        return self.count_wrong(output, self.contribution(self.size - 1, dtype))

    def all_gather(self, dtype: Any) -> float:
        output = [self.torch.zeros(SIZE, dtype=dtype, device=self.device) for _ in range(self.size)]
        self.dist.all_gather(output, self.local_input(dtype))
        return sum(self.count_wrong(tensor, self.contribution(rank, dtype)) for rank, tensor in enumerate(output))

    def all_gather_into_tensor(self, dtype: Any) -> float:
        output = self.torch.zeros(self.size * SIZE, dtype=dtype, device=self.device)
        self.dist.all_gather_into_tensor(output, self.local_input(dtype))
        return self.count_wrong(output, self.torch.cat([self.contribution(rank, dtype) for rank in range(self.size)]))

    def reduce_scatter(self, dtype: Any) -> float:
        output = self.torch.zeros(SIZE, dtype=dtype, device=self.device)
        self.dist.reduce_scatter_tensor(output, self.local_input(dtype, self.size * SIZE))
        return self.count_wrong(
            output, self.expected_sum(dtype, self.size * SIZE)[self.rank * SIZE : (self.rank + 1) * SIZE]
        )

    def all_to_all(self, dtype: Any) -> float:
        output = self.torch.zeros(self.size * SIZE, dtype=dtype, device=self.device)
        self.dist.all_to_all_single(output, self.local_input(dtype, self.size * SIZE))
        pieces = [self.contribution(rank, dtype, self.size * SIZE) for rank in range(self.size)]
        rows = slice(self.rank * SIZE, (self.rank + 1) * SIZE)
        return self.count_wrong(output, self.torch.cat([piece[rows] for piece in pieces]))

    def all_to_all_uneven(self, dtype: Any) -> float:
        """Exchange uneven splits: rank i sends (3 i + 5 j) mod 7 elements to rank j, possibly none."""

        def count_elements(source: int, target: int) -> int:
            return (3 * source + 5 * target) % 7

        send_counts = [count_elements(self.rank, other) for other in range(self.size)]
        receive_counts = [count_elements(other, self.rank) for other in range(self.size)]
        output = self.torch.zeros(sum(receive_counts), dtype=dtype, device=self.device)
        self.dist.all_to_all_single(output, self.local_input(dtype, sum(send_counts)), receive_counts, send_counts)
        expected = []
        for other in range(self.size):
            splits = [count_elements(other, target) for target in range(self.size)]
            expected.append(self.contribution(other, dtype, sum(splits)).split(splits)[self.rank])
        return self.count_wrong(output, self.torch.cat(expected))

    def broadcast(self, dtype: Any) -> float:
        output = self.local_input(dtype)
        self.dist.broadcast(output, src=self.size - 1)
        return self.count_wrong(output, self.contribution(self.size - 1, dtype))

    def send_and_receive(self, dtype: Any) -> float:
        """Send to the next rank and receive from the previous one at once."""
        if self.size == 1:
            return 0.0
        output = self.torch.zeros(SIZE, dtype=dtype, device=self.device)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            self.dist.P2POp(self.dist.isend, self.local_input(dtype), after),
            self.dist.P2POp(self.dist.irecv, output, before),
        ]
        for work in self.dist.batch_isend_irecv(operations):
            work.wait()
        return self.count_wrong(output, self.contribution(before, dtype))

    def random_sum(self, dtype: Any) -> float:
        inputs = [
            self.torch.randn(SIZE, generator=self.torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(self.size)
        ]
        output = inputs[self.rank].to(self.device)
        self.dist.all_reduce(output)
        expected = self.torch.stack([tensor.double() for tensor in inputs]).sum(0)
        return float((output.cpu().double() - expected).abs().max() / expected.abs().max())

    def halves(self) -> float:
        """All-reduce within halves of the world; every rank creates both groups and uses one."""
        middle = self.size // 2
        halves = [list(range(middle)), list(range(middle, self.size))]
        groups = [self.dist.new_group(half) for half in halves]
        index = int(self.rank >= middle)
        output = self.local_input(self.torch.float32)
        self.dist.all_reduce(output, group=groups[index])
        expected = sum(self.contribution(rank, self.torch.float32) for rank in halves[index])
        self.dist.destroy_process_group(groups[index])
        return self.count_wrong(output, expected)

    def barrier_and_wait(self) -> float:
        self.dist.barrier()
        output = self.local_input(self.torch.float32)
        work = self.dist.all_reduce(output, async_op=True)
        work.wait()
        return self.count_wrong(output, self.expected_sum(self.torch.float32))

    def bandwidth(self) -> Iterator[Measurement]:
        """Measure the algorithm bandwidth of an all_reduce: bytes of the tensor a second."""
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
    """Check torch's object collectives on the default HCCL group; megascend sends them over Gloo."""
    import torch.distributed as dist

    contribution = {"rank": rank, "text": "x" * (rank + 1)}
    output: list[Any] = [None] * size
    dist.all_gather_object(output, contribution)
    yield equal("all_gather_object", output, [{"rank": index, "text": "x" * (index + 1)} for index in range(size)])
    shared = [contribution if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    yield equal("broadcast_object_list", shared, [{"rank": 0, "text": "x"}])
    yield equal("the default group's backend", dist.get_backend(), "hccl")


if __name__ == "__main__":
    run_rank()
