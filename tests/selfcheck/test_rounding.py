"""How far a slice's own rounding moves its logits, and what that means for a difference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.selfcheck.process import BOUND, TrialResult
from megascend.selfcheck.trial_inputs import rounding

EPS = torch.finfo(torch.float32).eps


class Products(torch.nn.Module):
    """Logits that are rows of a matrix, less a number that ``cancelled`` of each cancels."""

    def __init__(self, cancelled: float) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.full((16, 8), 1.0) + cancelled)
        self.cancelled = cancelled

    def forward(self, ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[ids] - self.cancelled)


@pytest.mark.parametrize("cancelled", [0.0, 1000.0])
def test_rounding_is_that_of_the_parameters_and_leaves_them_alone(cancelled: float) -> None:
    model = Products(cancelled)
    before = model.table.detach().clone()
    ids = torch.arange(16)
    moved = rounding(model, [ids], [model(ids[None]).logits[0].detach()], seed=1)
    digit = EPS * (1 + cancelled)  # of a parameter, over logits of 1
    assert digit / 8 <= moved <= digit
    assert torch.equal(model.table, before)


def test_a_difference_counts_beyond_the_bound_and_beyond_the_slices_own_rounding() -> None:
    result = TrialResult(lengths=[3], alone=[3 * BOUND], together=[3 * BOUND], rounding=1e-6)
    assert not result.agrees
    assert replace(result, rounding=BOUND).agrees
    assert not replace(result, rounding=BOUND / 2).agrees
