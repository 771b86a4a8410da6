"""The memory estimate counts a vision tower: whole, on the first stage, with gradients and moments only if it is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascend.config import Lora, Parallel, RunConfig
from megascend.models.checkpoint_files.info import inspect_checkpoint, linear_layers
from megascend.models.memory.parameters import elements, stages
from megascend.runtime.topology.topology import plan
from megascend.testing import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "qwen3_vl", "qwen3_vl")


def stage_parameters(checkpoint: Path, **parallel: Any) -> list[Any]:
    info = inspect_checkpoint(checkpoint)
    size = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    topology = plan(Parallel(**parallel), size, info.shape)
    return stages(info.tensors, topology, info.shape.num_layers, info.shape.tied, images=info.architecture.images)


def test_tower_is_whole_on_the_first_stage(checkpoint: Path) -> None:
    info = inspect_checkpoint(checkpoint)
    tower = elements({name: header for name, header in info.tensors.items() if name.startswith("model.visual.")})
    total = elements(info.tensors)
    assert tower > 0
    [single] = stage_parameters(checkpoint)
    assert (single.tower, single.total) == (tower, total)
    first, last = stage_parameters(checkpoint, pipeline=2)
    assert (first.tower, last.tower) == (tower, 0)
    assert first.total + last.total == total
    [divided] = stage_parameters(checkpoint, tensor=2)
    assert divided.tower == tower
    assert divided.dense < single.dense


@pytest.mark.parametrize("engine", ["megatron", "single", "fsdp"])
def test_frozen_tower_has_no_gradients_and_moments(engine: str, checkpoint: Path, tmp_path: Path) -> None:
    from megascend.models.memory.estimate import Workload, estimate

    info = inspect_checkpoint(checkpoint)
    [single] = stage_parameters(checkpoint)
    figures: dict[str, Any] = {}
    for tower in ("frozen", "train"):
        config = RunConfig(
            model=checkpoint,
            output=tmp_path,
            data={"path": tmp_path},
            precision="fp32",
            engine=engine,
            vision_tower=tower,
            steps=1,
        )
        topology = plan(config.parallel, 1, info.shape)
        model = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        figures[tower] = estimate(config, info, model, topology, Workload(tokens=64, micro_batches=2), "plain")
    assert figures["frozen"].remarks == ("activations of the vision tower are not counted",)
    difference = {
        name: figures["train"].items[name] - figures["frozen"].items[name]
        for name in ("parameters", "gradients", "moments")
    }
    assert difference == {"parameters": 0, "gradients": 4 * single.tower, "moments": 8 * single.tower}


def test_adapter_in_the_tower_is_counted_once_on_every_tensor_parallel_rank(checkpoint: Path) -> None:
    info, rank = inspect_checkpoint(checkpoint), 4
    images = info.architecture.images
    assert images is not None
    # By hand: factors of fp32, gradients and two moments, for each linear layer of the tower.
    shapes = [
        header.shape
        for name, header in info.tensors.items()
        if name.startswith("model.visual.")
        and name.endswith((".qkv.weight", "attn.proj.weight", "_fc1.weight", "_fc2.weight"))
    ]
    assert len(shapes) == 3 * 4 + 3 * 2  # blocks, and a merger for each of two inner layers beside the last one
    expected = sum(16 * rank * (rows + columns) for rows, columns in shapes)
    for tensor in (1, 2):
        topology = plan(Parallel(tensor=tensor), tensor, info.shape)
        with_tower, text_only = (
            stages(
                info.tensors,
                topology,
                info.shape.num_layers,
                info.shape.tied,
                images=images,
                lora=Lora(rank=rank),
                adapted_tower=tower,
            )[0].adapter.factors
            * 16
            for tower in (images, None)
        )
        assert with_tower - text_only == expected
    names = {name for name in linear_layers(info, "train") if name.startswith("model.visual.")}
    assert len(names) == len(shapes)
    assert not [name for name in linear_layers(info) if name.startswith("model.visual.")]
