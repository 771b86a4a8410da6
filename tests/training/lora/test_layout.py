"""Factors in one flat vector: no gaps, no overlaps, shardings together, and each reduced over the ranks that share it."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from megascend.training.lora.layout import SHARDINGS, flat_layout, shape_groups
from megascend.training.lora.optimizer import reductions
from megascend.training.lora.target_modules import FusedSlice, TargetModule


def make_target(split, names, in_features, out_features, layer, experts=1, expert_total=None):
    """``names``: of the fused weights, each with an equal share of the output rows."""
    share = out_features // len(names)
    rows = torch.arange(out_features).split(share)
    return TargetModule(
        None,
        split,
        tuple(FusedSlice(f"model.layers.{layer}.{n}", share, r, torch.arange(share)) for n, r in zip(names, rows, strict=True)),
        in_features,
        out_features,
        0,
        in_features,
        experts=experts,
        expert_total=expert_total,
    )  # fmt: skip


def model():
    target_modules = []
    for layer in range(3):
        target_modules.append(make_target("column", ("q_proj", "k_proj", "v_proj"), 6, 12, layer))
        target_modules.append(make_target("row", ("o_proj",), 4, 6, layer))
        if layer == 1:
            target_modules.append(make_target("column", ("gate_up_proj",), 6, 10, layer, experts=2, expert_total=4))
            target_modules.append(make_target("row", ("down_proj",), 5, 6, layer, experts=2, expert_total=4))
    return target_modules


def test_target_modules_of_one_shape_form_a_group_in_the_models_order():
    groups = shape_groups(model())
    assert [[s.slices[0].name for s in shape_group.target_modules] for shape_group in groups] == [
        [f"model.layers.{layer}.q_proj" for layer in range(3)],
        [f"model.layers.{layer}.o_proj" for layer in range(3)],
        ["model.layers.1.gate_up_proj"],
        ["model.layers.1.down_proj"],
    ]
    assert [(f.sharding("a"), f.sharding("b")) for f in groups] == [
        ("copied", "split"),
        ("split", "copied"),
        ("expert_copied", "expert_split"),
        ("expert_split", "expert_copied"),
    ]


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_spans_fill_the_vector_once_and_shardings_lie_together(rank):
    groups = shape_groups(model())
    layout = flat_layout(groups, rank)
    claimed = torch.zeros(layout.size, dtype=torch.int)
    for span in layout.spans:
        claimed[span.start : span.stop] += 1
        assert span.shape == groups[span.shape_group].shape(span.factor, rank)
        start, stop = layout.ranges[groups[span.shape_group].sharding(span.factor)]
        assert start <= span.start
        assert span.stop <= stop
    assert bool((claimed == 1).all())
    assert {(span.shape_group, span.factor) for span in layout.spans} == set(product(range(4), "ab"))
    assert list(layout.ranges) == list(SHARDINGS)
    # By hand: qkv A 3 layers x 3 slices x rank x 6, B 3 x rank x 12; o A 3 x rank x 4, B 3 x rank x 6; experts twice.
    assert layout.size == rank * (3 * (3 * 6 + 12) + 3 * (4 + 6) + 2 * (6 + 10) + 2 * (5 + 6))


def test_a_rank_without_adapted_layers_has_an_empty_vector():
    layout = flat_layout([], 8)
    assert (layout.size, layout.spans) == (0, ())
    assert set(layout.ranges.values()) == {(0, 0)}


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
