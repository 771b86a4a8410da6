"""Rows of a fused layer as blocks: the views are the requested rows in their order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascend.training.lora.stacked_adapters import row_blocks


@given(st.sets(st.integers(0, 60), min_size=1).map(sorted))
def test_any_rows(rows):
    tensor = torch.arange(2 * 61).view(2, 61)
    result = torch.cat([block.view(tensor).flatten(1) for block in row_blocks(torch.tensor(rows))], dim=1)
    assert torch.equal(result, tensor[:, rows])


@given(groups=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 5))
def test_q_k_and_v_are_one_block_each(groups, heads, width):
    rows = torch.arange(groups * (heads + 2) * width).view(groups, heads + 2, width)
    for chosen in (rows[:, :heads], rows[:, heads], rows[:, heads + 1]):
        assert len(row_blocks(chosen.flatten())) == 1


@pytest.mark.parametrize("rows", [[3, 2], [1, 1]])
def test_rows_in_no_order_are_refused(rows):
    with pytest.raises(ValueError, match="ascend"):
        row_blocks(torch.tensor(rows))
