"""Muon's parts: the plan of who orthogonalises which matrix, and the iteration."""

from __future__ import annotations

import pytest
import torch

from megascend.config import Muon
from megascend.engines.common import muon
from megascend.engines.common.muon import Matrix, Tile, orthogonalised, plan, update_scale
from megascend.errors import ConfigError


def rows(name: str, first: int, count: int, columns: int) -> Tile:
    return Tile(Matrix(name, 0, 0), first, 0, count, columns)


def test_owners_are_holders_and_share_the_work():
    shapes = {f"w{number}": (4, 6) for number in range(8)} | {"alone": (2, 3)}
    tiles = [[rows(f"w{number}", 2 * rank, 2, 6) for number in range(8)] for rank in range(2)]
    tiles[1].append(rows("alone", 0, 2, 3))
    [works] = plan(tiles, shapes)
    owners = {work.matrix.weight: work.owner for work in works}
    assert sorted(owner for name, owner in owners.items() if name != "alone") in ([0] * 4 + [1] * 4, [0] * 5 + [1] * 3)
    assert owners["alone"] == 1
    assert all(
        work.sources[tile] == rank
        for work in works
        for rank in range(2)
        for tile in tiles[rank]
        if tile in work.sources
    )


def test_rounds_bound_what_an_owner_assembles(monkeypatch):
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 20)
    shapes = {"a": (2, 4), "b": (2, 4), "c": (2, 4), "large": (8, 8)}
    rounds = plan([[rows(name, 0, *shape) for name, shape in shapes.items()]], shapes)
    assert [[work.matrix.weight for work in works] for works in rounds] == [["a", "b"], ["c"], ["large"]]


def test_an_incomplete_matrix_raises_config_error():
    with pytest.raises(ConfigError, match="the ranks hold 6 of the 12 values of w"):
        plan([[rows("w", 0, 2, 3)], []], {"w": (4, 3)})


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_update_is_that_of_torch(shape, scale):
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=scale).step()
    settings = Muon(update_scale=scale)
    update = update_scale(settings, *shape) * orthogonalised(gradient[None].bfloat16(), settings.steps)[0].float()
    # torch iterates in bf16 too, and rounds in other places: each differs from the exact result by up to 0.02.
    assert (update + parameter).norm() / parameter.norm() < 0.04
    exact = update_scale(settings, *shape) * orthogonalised(gradient[None].double(), settings.steps)[0]
    assert (exact + parameter).norm() / parameter.norm() < 0.025


def test_a_matrix_of_zeros_stays_zero():
    assert not orthogonalised(torch.zeros(2, 3, 4), 5).any()
