"""Rank layouts against two references: a numpy grid, and Megatron-Core's own RankGenerator. Errors by their message."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.config import Parallel
from megascend.errors import TopologyError
from megascend.models.checkpoint_files.info import shape_of
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.topology.model_shape import ModelShape
from megascend.runtime.topology.topology import (
    ATTENTION_AXES,
    EXPERT_AXES,
    Topology,
    format_pipeline_layout,
    plan,
)
from megascend.testing import tiny_config

DENSE = shape_of(tiny_config("qwen3", num_attention_heads=8, num_key_value_heads=4))
WITH_HEAD = replace(DENSE, prediction_head=True)
MOE = shape_of(tiny_config("qwen3_moe", num_attention_heads=8, num_key_value_heads=4))
ODD = shape_of(tiny_config("qwen3", intermediate_size=129))
ODD_EXPERTS = shape_of(tiny_config("qwen3", num_experts=4, moe_intermediate_size=9))
ODD_SHARED = shape_of(tiny_config("qwen3", num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=9))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Draw any layout that Megatron accepts, up to 64 ranks, MoE or not, powers of two or not."""
    size = st.sampled_from([1, 2, 3, 4])
    tensor, context, pipeline, data = draw(size), draw(size), draw(size), draw(size)
    world = tensor * context * pipeline * data
    if world > 64:
        tensor, context, pipeline, data = (min(value, 2) for value in (tensor, context, pipeline, data))
        world = tensor * context * pipeline * data
    per_stage = world // pipeline
    expert = draw(st.sampled_from([value for value in range(1, 9) if per_stage % value == 0]))
    expert_tensor = tensor
    if expert > 1 or per_stage % (expert * tensor):
        choices = [value for value in range(1, 5) if per_stage % (expert * value) == 0]
        expert_tensor = draw(st.sampled_from(choices))
    parallel = Parallel(
        tensor=tensor, context=context, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, sequence=None
    )
    return plan(parallel, world)


def numpy_groups(topology: Topology, grid: tuple[str, ...], axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Reshape the ranks to an array with the fastest axis last, move ``axes`` to the end and flatten them."""
    slowest_first = grid[::-1]
    ranks = np.arange(topology.world_size).reshape([getattr(topology, axis) for axis in slowest_first])
    other_axes = [index for index, axis in enumerate(slowest_first) if axis not in axes]
    group_axes = [index for index, axis in enumerate(slowest_first) if axis in axes]
    width = int(np.prod([ranks.shape[index] for index in group_axes], initial=1))
    return {tuple(row) for row in ranks.transpose(other_axes + group_axes).reshape(-1, width).tolist()}


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_groups_equal_a_numpy_grid(topology: Topology) -> None:
    for grid in (ATTENTION_AXES, EXPERT_AXES):
        for count in range(len(grid) + 1):
            for axes in itertools.combinations(grid, count):
                groups = topology.groups(*axes)
                assert {tuple(group) for group in groups} == numpy_groups(topology, grid, axes)
                assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
                assert groups == sorted(groups)


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_groups_equal_megatrons_rank_generator(runtime: Runtime, topology: Topology) -> None:
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    sizes = {"order": order, "pp": topology.pipeline}
    attention = RankGenerator(tp=topology.tensor, ep=1, dp=topology.data, cp=topology.context, **sizes)
    experts = RankGenerator(tp=topology.expert_tensor, ep=topology.expert, dp=topology.expert_data, cp=1, **sizes)
    names = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    for tokens in ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-dp-cp", "tp-pp"):
        assert topology.groups(*(names[token] for token in tokens.split("-"))) == attention.get_ranks(tokens)
    names = {"tp": "expert_tensor", "ep": "expert", "dp": "expert_data", "pp": "pipeline"}
    for tokens in ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp"):
        assert topology.groups(*(names[token] for token in tokens.split("-"))) == experts.get_ranks(tokens)


@settings(max_examples=60, deadline=None)
@given(topologies())
def test_coordinates_equal_a_numpy_grid(topology: Topology) -> None:
    for grid in (ATTENTION_AXES, EXPERT_AXES):
        sizes = [topology.size(axis) for axis in grid[::-1]]
        for rank in range(topology.world_size):
            expected = [int(index) for index in np.unravel_index(rank, sizes)]
            assert [getattr(topology.coordinates(rank), axis) for axis in grid[::-1]] == expected


def test_sequence_parallelism_without_tensor_parallelism_is_noted() -> None:
    topology = plan(Parallel(sequence=True), 2, DENSE)
    assert not topology.sequence_parallel
    assert "sequence parallelism is off" in topology.notes[0]
    assert "note: parallel.sequence has nothing to divide" in topology.describe()
    assert plan(Parallel(tensor=2, sequence=True), 2, DENSE).sequence_parallel


@pytest.mark.parametrize(
    ("parallel", "world", "model", "message"),
    [
        ({"tensor": 3}, 3, DENSE, r"parallel.tensor=3 does not divide the 8 attention heads; use 1, 2, 4 or 8"),
        ({"tensor": 8}, 8, DENSE, r"parallel.tensor=8 does not divide the 4 query groups .*; use 1, 2 or 4"),
        (
            {"tensor": 2},
            3,
            DENSE,
            r"world size 3 is not a multiple of parallel.tensor=2 .* = 2; start 2 or 4",
        ),
        ({"context": 2, "pipeline": 2}, 2, DENSE, r"x parallel.context=2 = 4; start 4 processes"),
        ({"expert": 2}, 3, MOE, r"world size 3 .* parallel.expert=2 x parallel.pipeline=1 = 2; start 2 or 4"),
        ({"tensor": 2, "expert": 2}, 2, MOE, r"expert_tensor=2 x parallel.expert=2 .*\(expert_tensor defaults to tens"),
        (
            {"pipeline": 3},
            3,
            DENSE,
            r"4 layers cannot .* parallel.pipeline=3 stages; use 1, 2 or 4, or .*pipeline_layout",
        ),
        ({"pipeline": 2, "pipeline_layout": "Et|tt|tL"}, 2, None, r"has 3 chunks, but parallel.pipeline=2 x .*=1 = 2"),
        ({"pipeline_layout": "Ettt|tL"}, 1, DENSE, r"has 2 chunks, but parallel.pipeline=1"),
        (
            {"pipeline": 2, "pipeline_layout": "Etx|tL"},
            2,
            DENSE,
            r"'x\|tL' is not a part of a layout: E \(embedding\)",
        ),
        ({"pipeline": 2, "pipeline_layout": "tt|ttL"}, 2, DENSE, r"chunk 1 of 2 is 'tt'; the first begins with E"),
        ({"pipeline": 2, "pipeline_layout": "Ett|tt"}, 2, DENSE, r"chunk 2 of 2 is 'tt'; .* the last ends with L"),
        ({"pipeline": 3, "pipeline_layout": "Ett|ttm|L"}, 3, DENSE, r"chunk 2 of 3 is 'ttm'; .* mL if that head"),
        ({"pipeline": 3, "pipeline_layout": "Ett||ttL"}, 3, DENSE, r"chunk 2 of 3 is empty"),
        ({"pipeline": 2, "pipeline_layout": "Ett|tL"}, 2, DENSE, r"has 3 layers \(t\), but the model has 4"),
        ({"pipeline": 2, "pipeline_layout": "Ettt|tmL"}, 2, DENSE, r"has a head for .* \(m\), .* leave m out"),
        (
            {"pipeline": 2, "pipeline_layout": "Ett*3|mL"},
            2,
            WITH_HEAD,
            r"the last chunk, 'mL', has a head .* no layer; .*: tmL",
        ),
        ({"pipeline": 2, "pipeline_layout": "Ettt|tL"}, 2, WITH_HEAD, r"has no place for the head .* end it with mL"),
        ({"pipeline": 2, "virtual_pipeline": 4}, 2, DENSE, r"pipeline=2 x parallel.virtual_pipeline=4 = 8 stages"),
        ({"virtual_pipeline": 2}, 1, DENSE, r"virtual_pipeline=2 .* parallel.pipeline=1; set pipeline to 2 or more"),
        ({"expert": 2}, 2, DENSE, r"parallel.expert=2, but the model has no experts"),
        ({"expert_tensor": 1}, 1, DENSE, r"parallel.expert_tensor=1, but the model has no experts"),
        ({"expert": 3}, 3, MOE, r"parallel.expert=3 does not divide the 4 experts; use 1, 2 or 4"),
        ({"tensor": 2, "expert_tensor": 1}, 2, MOE, r"expert_tensor=1 differs from parallel.tensor=2 while .*expert=1"),
        ({"expert_tensor": 2}, 2, MOE, r"expert_tensor=2 differs from parallel.tensor=1 .*; set expert_tensor to 1"),
        ({"tensor": 2, "sequence": False}, 2, MOE, r"parallel.sequence=false with experts and parallel.tensor=2"),
        ({}, 0, None, r"the world has 0 ranks"),
        ({"tensor": 2}, 4, ODD, "does not divide the 129 columns of the MLP .*; use 1, 3, 43"),
        ({"expert": 2, "expert_tensor": 2}, 4, ODD_EXPERTS, "9 columns of an expert"),
        ({"tensor": 2}, 4, ODD_SHARED, "9 columns of the shared experts"),
    ],
)
def test_layouts_that_cannot_work(parallel: dict[str, Any], world: int, model: ModelShape | None, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        plan(Parallel(**parallel), world, model)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("Et|(tt|)*30L", (1, *[2] * 30, 0)),  # DeepSeek-V3 in NVIDIA's recipes, without its head, and the next one
        ("Et*4|(t*4|)*14tmL", (*[4] * 15, 1)),
        ("E|tt|ttt|L", (0, 2, 3, 0)),
        ("Ettt|tttttL", (3, 5)),
    ],
)
@pytest.mark.usefixtures("megatron_imported")
def test_pipeline_layouts_are_megatrons(layout: str, sizes: tuple[int, ...]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    has_head = "m" in layout
    model = replace(DENSE, num_layers=sum(sizes), prediction_head=has_head)
    parallel = Parallel(pipeline=2, virtual_pipeline=len(sizes) // 2, pipeline_layout=layout)
    topology = plan(parallel, 2, model)
    assert topology.chunk_layers == sizes
    formatted = format_pipeline_layout(sizes, prediction_head=has_head)
    megatron = [PipelineParallelLayerLayout(text, 2) for text in (layout, formatted)]
    assert megatron[0].layout == megatron[1].layout
    megatron[0].validate_layer_layout(sum(sizes), 1 if has_head else None)
    first = 0
    for number in range(len(sizes)):
        chunk, stage = divmod(number, 2)
        count = megatron[0].layout[stage][chunk].count(LayerType.decoder)
        assert topology.layers_of(stage, sum(sizes))[chunk] == range(first, first + count)
        first += count


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda topology: topology.coordinates(2), "rank 2 is outside the world of 2 ranks"),
        (lambda topology: topology.group_of(-1, "data"), "rank -1 is outside"),
        (lambda topology: topology.groups("dp"), "unknown axis 'dp'; known: tensor, context"),
        (lambda topology: topology.groups("tensor", "expert"), "tensor and expert are not axes of one grid"),
    ],
)
def test_questions_that_make_no_sense(call: Callable[[Topology], object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        call(plan(Parallel(), 2))


def large(world_size: int) -> Topology:
    return plan(Parallel(tensor=8, pipeline=16, expert=64, expert_tensor=1), world_size)
