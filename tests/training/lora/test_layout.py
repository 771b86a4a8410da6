"""Factors in one flat vector: no gaps, no overlaps, shardings together, and each reduced over the ranks that share it."""

from types import SimpleNamespace

import pytest

from megascend.training.lora.layout import SHARDINGS
from megascend.training.lora.optimizer import reductions

# Every layout of the five shardings, as (tensor, sequence, data * context, expert_tensor, expert_data) and the groups.
REDUCTIONS = [
    ({}, ([], [], [], [], [])),
    ({"tensor": 2}, ([], [], [], [], [])),
    # Ranks of a tensor parallel group each have the complete gradient of a vision tower.
    ({"tensor": 2, "sequence": True}, (["tp"], [], [], [], [])),
    ({"sequence": True}, ([], [], [], [], [])),
    ({"data": 2, "expert_data": 2}, (["dp_cp"], ["dp_cp"], ["dp_cp"], ["edp"], ["edp"])),
    ({"context": 2, "expert_data": 2}, (["dp_cp"], ["dp_cp"], ["dp_cp"], ["edp"], ["edp"])),
    ({"data": 2}, (["dp_cp"], ["dp_cp"], ["dp_cp"], [], [])),  # expert parallelism over the data parallel ranks
    ({"tensor": 2, "sequence": True, "expert_tensor": 2}, (["tp"], [], [], ["etp"], [])),
    (
        {"tensor": 2, "sequence": True, "expert_tensor": 2, "data": 2, "expert_data": 2},
        (["tp", "dp_cp"], ["dp_cp"], ["dp_cp"], ["etp", "edp"], ["edp"]),
    ),
]


@pytest.mark.parametrize(("sizes", "expected"), REDUCTIONS, ids=str)
def test_gradients_are_summed_over_the_ranks_that_have_parts_of_the_sum(sizes, expected):
    defaults = {"tensor": 1, "sequence": False, "data": 1, "context": 1, "expert_tensor": 1, "expert_data": 1}
    values = defaults | sizes
    topology = SimpleNamespace(sequence_parallel=values.pop("sequence"), **values)
    assert tuple(reductions(sharding, topology) for sharding in SHARDINGS) == expected
