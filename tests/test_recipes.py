"""Run files of examples and recipes: they are accepted, and the recipes' models allow the layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascend.config import TrainerConfig, load_config, read_settings
from megascend.config.rl import RlConfig, load_rl_config
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.sparse_checkpoint import write_sparse_checkpoint
from megascend.runtime.topology.topology import plan

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
FILES = sorted((ROOT / "recipes").glob("*.yaml"))
FIGURES = json.loads((ROOT / "benchmarks" / "planning" / "recipes.json").read_text())


def load(path: Path) -> TrainerConfig:
    return load_rl_config(path) if "rollout" in read_settings(path) else load_config(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # examples name files below it
    config = load(path)
    assert Path(config.rollout.prompts if isinstance(config, RlConfig) else config.data.path).is_file()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipe_is_accepted_and_its_model_allows_the_layout(path: Path, tmp_path: Path) -> None:
    config, row = load(path), FIGURES[path.stem]
    published = json.loads((ROOT / "tests" / "models" / "published" / f"{row['model']}.json").read_text())
    published.pop("quantization_config", None)
    info = inspect_checkpoint(write_sparse_checkpoint(tmp_path, published))
    world = row["cards"]
    if isinstance(config, RlConfig):
        assert config.placement.trainer is not None
        assert config.placement.engines is not None
        world = len(config.placement.trainer)
        assert world + sum(map(len, config.placement.engines)) <= row["cards"]
    topology = plan(config.parallel, world, info.shape)
    assert topology.world_size == world
    # A card holds at least its share of the weights in bf16, and no more than it has.
    assert 2 * info.parameter_count / row["cards"] < row["memory_bytes"]
    assert config.batching.max_length == row["length"]
    assert (config.lora is None) == (row["lora"] is None)
    comments = path.read_text().replace("\n# ", " ")  # they are wrapped
    assert "predicted (not measured)" in comments
    assert f"Measured: {row['measured']}." in comments
