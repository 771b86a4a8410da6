"""Non-contiguous tensors (columns of a matrix) in collectives over Gloo: correct, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascend.errors import PlatformError
from megascend.runtime.bootstrap.reference import gloo
from megascend.testing import run_distributed

MATRIX = torch.arange(8.0).view(2, 4)
SQUARE = torch.arange(16.0).view(4, 4)


def columns() -> list[Tensor]:
    gloo.install()
    gloo.install()
    pieces = list(MATRIX.chunk(2, dim=1)) if dist.get_rank() == 0 else None
    assert pieces is None or not pieces[0].is_contiguous()
    results = [torch.empty(2, 2) for _ in range(3)]
    dist.scatter(results[0], pieces, 0)
    dist.scatter(results[1], scatter_list=pieces, src=0)
    dist.scatter(results[2], pieces, src=0, async_op=True).wait()
    return results


def sums() -> list[Tensor]:
    gloo.install()
    pieces = [piece.t() for piece in (SQUARE * (1 + dist.get_rank())).chunk(2)]
    assert not pieces[0].is_contiguous()
    results = [torch.empty(4, 2), torch.empty(4, 2)]
    dist.reduce_scatter(results[0], pieces)
    dist.reduce_scatter(output=results[1], input_list=pieces)
    return results


def refusals() -> None:
    gloo.install()
    transposed = MATRIX.t()
    strided = torch.zeros(2, 4)[:, 1:3]
    for call in (
        lambda: dist.all_reduce(strided),
        lambda: dist.all_reduce(tensor=transposed),
        lambda: dist.reduce(strided, 0),
        lambda: dist.broadcast(strided, src=0),
        lambda: dist.scatter(strided, None, 0),
        lambda: dist.reduce_scatter(strided, [MATRIX, MATRIX]),
    ):
        with pytest.raises(PlatformError, match=r"is not contiguous"):
            call()
    contiguous = torch.ones(2, 2)
    dist.all_reduce(contiguous)
    assert torch.equal(contiguous, torch.full((2, 2), 2.0)), "contiguous tensors are reduced"


def test_every_rank_gets_its_columns() -> None:
    for rank, results in enumerate(run_distributed(columns, world_size=2)):
        for tensor in results:
            assert torch.equal(tensor, MATRIX[:, 2 * rank : 2 * rank + 2])


def test_every_rank_gets_its_sum_of_columns() -> None:
    for rank, results in enumerate(run_distributed(sums, world_size=2)):
        for tensor in results:
            assert torch.equal(tensor, 3 * SQUARE.chunk(2)[rank].t())


def test_non_contiguous_outputs_are_refused() -> None:
    run_distributed(refusals, world_size=2)
