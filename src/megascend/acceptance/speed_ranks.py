"""``torchrun -m megascend.acceptance.speed_ranks JOB``: one rank that trains a few steps on the same batch and takes the time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import megascend
from megascend.acceptance.ranks import read_job


def main(argument: str) -> None:
    """Rank 0 leaves the figures of all."""
    job = read_job(argument)
    parallel = megascend.Parallel(**job["parallel"])
    megascend.bootstrap("npu", parallel)
    import torch

    from megascend.distributed.objects import gather_objects

    backend = megascend.MegatronBackend(
        model=job["model"],
        parallel=parallel,
        precision="bf16",
        optimizer=megascend.Adam(lr=1e-3),
        batching=megascend.Batching(packing=True, micro_batch_tokens=job["length"]),
        platform="npu",
        timeout_s=120,
    )
    count = job["samples"] * backend.topology.data
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, backend.vocab_size, (count, job["length"]), generator=generator).tolist()
    share = backend.shard([megascend.Sample.causal(each) for each in ids])
    seconds, losses = [], []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        result = backend.forward_backward(share)
        backend.optimizer_step()
        backend.platform.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
    memory = backend.platform.memory()
    peaks = gather_objects(memory.peak, "world", backend.groups, "peak memory")
    if backend.rank == 0:
        answer = {
            "seconds": seconds,
            "losses": losses,
            "tokens": count * job["length"],
            "peaks": peaks,
            "memory": memory.total,
            "parameters": backend.parameter_count,
            "flops_per_token": backend.flops_per_token(job["length"]),
        }
        Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1])
