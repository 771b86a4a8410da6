"""The effect of fp32 rounding on a slice's logits, and the bound that it sets for differences."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.models.selfcheck.process import BOUND, TrialResult
from megascend.models.selfcheck.trial_inputs import rounding

EPS = torch.finfo(torch.float32).eps


class Products(torch.nn.Module):
    """Model whose logits are rows of a matrix minus the constant ``cancelled``, which was added to the parameters."""

    def __init__(self, cancelled: float) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.full((16, 8), 1.0) + cancelled)
        self.cancelled = cancelled

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids] - self.cancelled)


@pytest.mark.parametrize("cancelled", [0.0, 1000.0])
def test_rounding_measures_and_restores_the_parameters(cancelled: float) -> None:
    model = Products(cancelled)
    before = model.table.detach().clone()
    ids = torch.arange(16)
    moved = rounding(model, [ids], [model(ids[None]).logits[0].detach()], seed=1)
    digit = EPS * (1 + cancelled)  # of a parameter, over logits of 1
    assert digit / 8 <= moved <= digit
    assert torch.equal(model.table, before)


def test_bound_grows_with_the_rounding_of_the_slice() -> None:
    result = TrialResult(lengths=[3], separate=[3 * BOUND], batched=[3 * BOUND], rounding=1e-6)
    assert not result.agrees
    assert replace(result, rounding=BOUND).agrees
    assert not replace(result, rounding=BOUND / 2).agrees
