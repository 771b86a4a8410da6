"""Factors in one flat vector: no gaps, no overlaps, kinds together, and each kind reduced over the ranks that share it."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from megascend.lora.layout import KINDS, families, flat_layout
from megascend.lora.optimizer import reductions
from megascend.lora.target_modules import Part, Site


def site(split, parts, in_features, out_features, layer, experts=1, expert_total=None):
    """``parts``: names, each with an equal share of the output rows."""
    share = out_features // len(parts)
    rows = torch.arange(out_features).split(share)
    return Site(
        None,
        split,
        tuple(Part(f"model.layers.{layer}.{n}", share, r, torch.arange(share)) for n, r in zip(parts, rows, strict=True)),
        in_features,
        out_features,
        0,
        in_features,
        experts=experts,
        expert_total=expert_total,
    )  # fmt: skip


def model():
    sites = []
    for layer in range(3):
        sites.append(site("column", ("q_proj", "k_proj", "v_proj"), 6, 12, layer))
        sites.append(site("row", ("o_proj",), 4, 6, layer))
        if layer == 1:
            sites.append(site("column", ("gate_up_proj",), 6, 10, layer, experts=2, expert_total=4))
            sites.append(site("row", ("down_proj",), 5, 6, layer, experts=2, expert_total=4))
    return sites


def test_sites_of_one_shape_form_a_family_in_the_models_order():
    found = families(model())
    assert [[s.parts[0].name for s in family.sites] for family in found] == [
        [f"model.layers.{layer}.q_proj" for layer in range(3)],
        [f"model.layers.{layer}.o_proj" for layer in range(3)],
        ["model.layers.1.gate_up_proj"],
        ["model.layers.1.down_proj"],
    ]
    assert [(f.kind("a"), f.kind("b")) for f in found] == [
        ("copied", "split"),
        ("split", "copied"),
        ("expert_copied", "expert_split"),
        ("expert_split", "expert_copied"),
    ]


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_spans_fill_the_vector_once_and_kinds_lie_together(rank):
    found = families(model())
    layout = flat_layout(found, rank)
    claimed = torch.zeros(layout.size, dtype=torch.int)
    for span in layout.spans:
        claimed[span.start : span.stop] += 1
        assert span.shape == found[span.family].shape(span.factor, rank)
        start, stop = layout.ranges[found[span.family].kind(span.factor)]
        assert start <= span.start
        assert span.stop <= stop
    assert bool((claimed == 1).all())
    assert {(span.family, span.factor) for span in layout.spans} == set(product(range(4), "ab"))
    assert list(layout.ranges) == list(KINDS)
    # By hand: qkv A 3 layers x 3 parts x rank x 6, B 3 x rank x 12; o A 3 x rank x 4, B 3 x rank x 6; experts twice.
    assert layout.size == rank * (3 * (3 * 6 + 12) + 3 * (4 + 6) + 2 * (6 + 10) + 2 * (5 + 6))


def test_a_rank_without_adapted_layers_has_an_empty_vector():
    layout = flat_layout([], 8)
    assert (layout.size, layout.spans) == (0, ())
    assert set(layout.ranges.values()) == {(0, 0)}


# Every layout of the four kinds, as (tensor, sequence, data * context, expert_tensor, expert_data) and the groups.
REDUCTIONS = [
    ({}, ([], [], [], [])),
    ({"tensor": 2}, ([], [], [], [])),
    ({"tensor": 2, "sequence": True}, (["tp"], [], [], [])),
    ({"sequence": True}, ([], [], [], [])),
    ({"data": 2, "expert_data": 2}, (["dp_cp"], ["dp_cp"], ["edp"], ["edp"])),
    ({"context": 2, "expert_data": 2}, (["dp_cp"], ["dp_cp"], ["edp"], ["edp"])),
    ({"data": 2}, (["dp_cp"], ["dp_cp"], [], [])),  # expert parallelism over the data parallel ranks
    ({"tensor": 2, "sequence": True, "expert_tensor": 2}, (["tp"], [], ["etp"], [])),
    (
        {"tensor": 2, "sequence": True, "expert_tensor": 2, "data": 2, "expert_data": 2},
        (["tp", "dp_cp"], ["dp_cp"], ["etp", "edp"], ["edp"]),
    ),
]


@pytest.mark.parametrize(("sizes", "expected"), REDUCTIONS, ids=str)
def test_gradients_are_summed_over_the_ranks_that_have_parts_of_the_sum(sizes, expected):
    defaults = {"tensor": 1, "sequence": False, "data": 1, "context": 1, "expert_tensor": 1, "expert_data": 1}
    values = defaults | sizes
    topology = SimpleNamespace(sequence_parallel=values.pop("sequence"), **values)
    assert tuple(reductions(kind, topology) for kind in KINDS) == expected


def test_a_span_is_as_long_as_its_shape():
    for span in flat_layout(families(model()), 5).spans:
        assert span.stop - span.start == math.prod(span.shape)
