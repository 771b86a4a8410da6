"""Detection of NaN at any position."""

import pytest
import torch

from megascend.reference.reductions import names_with_nan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_number_among_many_is_found(dtype):
    values = torch.randn(3, 1001).to(dtype)
    tensors = {
        "whole": values,
        "infinite": torch.full((5,), torch.inf).to(dtype),
        "empty": values[:0],
        "ids": torch.arange(3),
    }
    assert names_with_nan(tensors) == []
    assert names_with_nan({}) == []
    for index in (0, 16, 1000, 3002):
        damaged = values.clone()
        damaged.view(-1)[index] = torch.nan
        assert names_with_nan(tensors | {"damaged": damaged, "view": damaged.T}) == ["damaged", "view"]
        opposed = torch.full((3, 1001), -torch.inf).to(dtype)
        opposed.view(-1)[index] = torch.nan
        assert names_with_nan({"opposed": opposed}) == ["opposed"]
