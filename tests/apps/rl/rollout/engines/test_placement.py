"""Assignment of GPUs to engines, and vLLM's options for its device."""

from __future__ import annotations

import pytest

from megascend.apps.rl.rollout.engines.placement import (
    Placement,
    device_options,
    place_engines,
    trainer_environment,
    visible_gpus,
)
from megascend.errors import ConfigError


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
    assert place_engines(["4", "6"], 1, 1) == [Placement(("6",), 0.7, False)]
    assert [placement.gpus for placement in place_engines(["0", "1", "2", "3"], 2, 2)] == [("2",), ("3",)]
    assert place_engines(["0"], 0, 1) == [Placement(("0",), 0.7, False)]  # the trainer is on the CPU


def test_engines_without_a_free_gpu_share_that_of_rank_0() -> None:
    assert place_engines(["0"], 1, 1) == [Placement(("0",), 0.35, True)]
    assert [placement.gpus for placement in place_engines(["2", "3"], 2, 1)] == [("2",)]
    assert sum(placement.memory for placement in place_engines(["0"], 1, 3)) == pytest.approx(0.35)
    assert sum(placement.memory for placement in place_engines(["0", "1"], 1, 2)) == pytest.approx(0.7)
    assert place_engines([], 1, 1) == []


def test_engine_on_a_gpu_gets_bf16_and_graphs_and_on_a_cpu_neither() -> None:
    assert device_options("cuda") == device_options("npu") == ["--dtype=bfloat16"]
    assert device_options("cpu") == ["--enforce-eager", "--dtype=float32"]
    (placement,) = place_engines(["0", "1"], 1, 1)
    assert placement.environment() == {"CUDA_VISIBLE_DEVICES": "1"}
    assert placement.options() == ["--gpu-memory-utilization=0.7"]


def test_named_gpus_are_those_of_engines_and_trainer() -> None:
    gpus = ["a", "b", "c", "d"]
    assert place_engines(gpus, 2, 1, engine_gpus=[[2, 3]]) == [Placement(("c", "d"), 0.7, False)]
    assert place_engines(gpus, 2, 2, engine_gpus=[[1], [1]], memory=0.2) == [Placement(("b",), 0.2, True)] * 2
    assert place_engines(gpus, 1, 1, trainer_gpus=[3]) == [Placement(("a",), 0.7, False)]
    assert trainer_environment(gpus, 2, [3, 2]) == {"CUDA_VISIBLE_DEVICES": "d,c"}
    assert trainer_environment(gpus, 2, None) == {}
    (placement,) = place_engines(gpus, 2, 1, engine_gpus=[[2, 3]])
    assert placement.environment() == {"CUDA_VISIBLE_DEVICES": "c,d"}
    assert placement.options() == ["--gpu-memory-utilization=0.7", "--tensor-parallel-size=2"]
    assert str(placement) == "GPUs c, d, 70% of the memory"


@pytest.mark.parametrize(
    ("gpus", "trainers", "engines", "settings", "message"),
    [
        (2, 1, 1, {"engine_gpus": [[2]]}, r"placement\.engines\[0\] names GPU 2; visible are 2, 0 to 1"),
        (2, 1, 1, {"trainer_gpus": [5]}, r"placement\.trainer names GPU 5; visible are 2"),
        (4, 1, 1, {"engine_gpus": [[1, 1]]}, r"placement\.engines\[0\] names a GPU twice: 1, 1"),
        (4, 1, 2, {"engine_gpus": [[1]]}, r"has the GPUs of 1 engines, and 2 are started"),
        (4, 1, 1, {"engine_gpus": [[]]}, r"placement\.engines\[0\] is empty"),
        (4, 3, 1, {"trainer_gpus": [0, 1]}, r"placement\.trainer has 2 GPUs, and 3 processes of the trainer"),
        (
            2,
            1,
            2,
            {"engine_gpus": [[1], [1]], "memory": 0.6},
            r"placement\.memory: 0\.6 for each of 2 engines on one GPU",
        ),
        (0, 1, 1, {"engine_gpus": [[0]]}, "placement names GPUs, and this host shows none"),
    ],
)
def test_impossible_placement_is_refused_by_name(gpus, trainers, engines, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        place_engines([str(number) for number in range(gpus)], trainers, engines, **settings)
