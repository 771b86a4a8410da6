"""Columns of a matrix scattered over Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.bootstrap.reference import gloo_scatter
from megascend.testing import run_distributed

MATRIX = torch.arange(8.0).view(2, 4)


def columns() -> tuple[Tensor, Tensor, Tensor]:
    gloo_scatter.install()
    pieces = list(MATRIX.chunk(2, dim=1)) if dist.get_rank() == 0 else None
    assert pieces is None or not pieces[0].is_contiguous()
    found, by_keyword, waited_for = torch.empty(2, 2), torch.empty(2, 2), torch.empty(2, 2)
    dist.scatter(found, pieces, 0)
    dist.scatter(by_keyword, scatter_list=pieces, src=0)
    dist.scatter(waited_for, pieces, src=0, async_op=True).wait()
    return found, by_keyword, waited_for


def test_every_rank_gets_its_columns() -> None:
    for rank, found in enumerate(run_distributed(columns, world_size=2)):
        for tensor in found:
            assert torch.equal(tensor, MATRIX[:, 2 * rank : 2 * rank + 2])
