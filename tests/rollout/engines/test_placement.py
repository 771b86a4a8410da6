"""Which GPU an engine gets beside a trainer, and what vLLM is told for its device."""

from __future__ import annotations

import pytest

from megascend.rollout.engines.placement import Placement, device_options, place_engines, visible_gpus


@pytest.mark.parametrize(
    ("environment", "count", "expected"),
    [
        ({}, 2, ["0", "1"]),
        ({}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "3, 5"}, 2, ["3", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 2, ["GPU-a", "GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 1, ["1"]),
    ],
)
def test_visible_gpus_have_the_names_that_a_child_needs(environment, count, expected) -> None:
    assert visible_gpus(environment, count) == expected


def test_engine_gets_a_gpu_that_no_trainer_uses() -> None:
    assert place_engines(["4", "6"], 1, 1) == [Placement("6", 0.7, False)]
    assert [place.gpu for place in place_engines(["0", "1", "2", "3"], 2, 2)] == ["2", "3"]
    assert place_engines(["0"], 0, 1) == [Placement("0", 0.7, False)]  # the trainer is on the CPU


def test_engines_without_a_free_gpu_share_that_of_rank_0() -> None:
    assert place_engines(["0"], 1, 1) == [Placement("0", 0.35, True)]
    assert [place.gpu for place in place_engines(["2", "3"], 2, 1)] == ["2"]
    assert sum(place.memory for place in place_engines(["0"], 1, 3)) == pytest.approx(0.35)
    assert sum(place.memory for place in place_engines(["0", "1"], 1, 2)) == pytest.approx(0.7)
    assert place_engines([], 1, 1) == []


def test_engine_on_a_gpu_gets_bf16_and_graphs_and_on_a_cpu_neither() -> None:
    assert device_options("cuda") == device_options("npu") == ["--dtype=bfloat16"]
    assert device_options("cpu") == ["--enforce-eager", "--dtype=float32"]
    (place,) = place_engines(["0", "1"], 1, 1)
    assert place.environment() == {"CUDA_VISIBLE_DEVICES": "1"}
    assert place.options() == ["--gpu-memory-utilization=0.7"]
