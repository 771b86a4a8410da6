"""Gather and reduce-scatter with uneven splits, against their definitions."""

import torch
import torch.distributed as dist

from megascend.runtime.bootstrap.reference.gloo import gather, reduce_scatter
from megascend.testing import run_distributed

SIZES = [3, 0, 2]


def test_gather_and_reduce_scatter_with_uneven_splits():
    parts = [
        torch.arange(size * 2, dtype=torch.float32).reshape(size, 2) + 10 * rank for rank, size in enumerate(SIZES)
    ]
    inputs = [torch.randn(sum(SIZES), 2, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def on_rank():
        rank = dist.get_rank()
        return gather(parts[rank], dist.group.WORLD, SIZES), reduce_scatter(inputs[rank], dist.group.WORLD, SIZES)

    expected = sum(inputs).split(SIZES)
    for rank, (gathered, reduced) in enumerate(run_distributed(on_rank, 3, timeout_s=30)):
        assert torch.equal(gathered, torch.cat(parts))
        torch.testing.assert_close(reduced, expected[rank])
