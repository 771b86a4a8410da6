"""Columns of a matrix in collectives over Gloo: right, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascend.bootstrap.reference import gloo
from megascend.errors import PlatformError
from megascend.testing import run_distributed

MATRIX = torch.arange(8.0).view(2, 4)
SQUARE = torch.arange(16.0).view(4, 4)


def columns() -> list[Tensor]:
    gloo.install()
    gloo.install()
    pieces = list(MATRIX.chunk(2, dim=1)) if dist.get_rank() == 0 else None
    assert pieces is None or not pieces[0].is_contiguous()
    found = [torch.empty(2, 2) for _ in range(3)]
    dist.scatter(found[0], pieces, 0)
    dist.scatter(found[1], scatter_list=pieces, src=0)
    dist.scatter(found[2], pieces, src=0, async_op=True).wait()
    return found


def sums() -> list[Tensor]:
    gloo.install()
    pieces = [each.t() for each in (SQUARE * (1 + dist.get_rank())).chunk(2)]
    assert not pieces[0].is_contiguous()
    found = [torch.empty(4, 2), torch.empty(4, 2)]
    dist.reduce_scatter(found[0], pieces)
    dist.reduce_scatter(output=found[1], input_list=pieces)
    return found


def refusals() -> None:
    gloo.install()
    turned = MATRIX.t()
    strided = torch.zeros(2, 4)[:, 1:3]
    for call in (
        lambda: dist.all_reduce(strided),
        lambda: dist.all_reduce(tensor=turned),
        lambda: dist.reduce(strided, 0),
        lambda: dist.broadcast(strided, src=0),
        lambda: dist.scatter(strided, None, 0),
        lambda: dist.reduce_scatter(strided, [MATRIX, MATRIX]),
    ):
        with pytest.raises(PlatformError, match=r"is not contiguous"):
            call()
    whole = torch.ones(2, 2)
    dist.all_reduce(whole)
    assert torch.equal(whole, torch.full((2, 2), 2.0)), "the others go on"


def test_every_rank_gets_its_columns() -> None:
    for rank, found in enumerate(run_distributed(columns, world_size=2)):
        for tensor in found:
            assert torch.equal(tensor, MATRIX[:, 2 * rank : 2 * rank + 2])


def test_every_rank_gets_its_sum_of_columns() -> None:
    for rank, found in enumerate(run_distributed(sums, world_size=2)):
        for tensor in found:
            assert torch.equal(tensor, 3 * SQUARE.chunk(2)[rank].t())


def test_what_would_be_written_wrong_is_refused() -> None:
    run_distributed(refusals, world_size=2)
