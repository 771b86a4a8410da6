"""Time all-reduce over Gloo for ``megascend doctor``; arguments: STORE WORLD RANK."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta

SMALL, LARGE = 2, 4 * 1024 * 1024
"""Elements (float32) of the two measured all-reduces: 8 bytes and 16 MiB."""


def probe(store: str, world_size: int, rank: int) -> dict[str, float]:
    """Measure the median time of an 8-byte all-reduce, and bytes per second of a 16 MiB one (buffer size over best time)."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )

    def seconds(tensor: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        return time.perf_counter() - start

    try:
        check = torch.full((SMALL,), float(rank + 1))
        dist.all_reduce(check)
        if check[0].item() != world_size * (world_size + 1) / 2:
            raise RuntimeError(f"all_reduce gave {check[0].item()} instead of {world_size * (world_size + 1) / 2}")
        # The first rounds open connections and are not counted.
        small = [seconds(torch.zeros(SMALL)) for _ in range(100)][20:]
        large = [seconds(torch.zeros(LARGE)) for _ in range(6)][1:]
    finally:
        dist.destroy_process_group()
    return {"latency_us": statistics.median(small) * 1e6, "bandwidth_gb_s": 4 * LARGE / min(large) / 1e9}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
