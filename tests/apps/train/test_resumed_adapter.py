"""A resumed run with other settings of its adapter: they are applied, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from support.runs import metrics, run_config, tiny_run

DEADLINE_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, data, and a run of an adapter that ended after two of four steps."""
    folder = tiny_run(tmp_path_factory.mktemp("adapter"), (f"number {n}" for n in range(8)))
    run_distributed(lambda: train(settings(folder, steps=2)), 1, init=False, timeout_s=DEADLINE_S)
    return folder


def settings(folder: Path, steps: int = 4, **lora: Any) -> RunConfig:
    lora = {"rank": 2, "alpha": 4, "targets": ("q_proj", "v_proj")} | lora
    return run_config(folder, folder / "run", steps=steps, lora=lora, checkpoint={"every": 2}, export=True)


def resume(config: RunConfig, output: Path) -> None:
    """Train from the checkpoint of :func:`folder`'s run in another directory."""
    changed = config.model_copy(update={"output": output})
    run_distributed(lambda: train(changed, resume=config.output), 1, init=False, timeout_s=DEADLINE_S)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rank": 4}, "lora.rank: 4, and the adapter in .*step-00000002 has 2: set lora.rank: 2"),
    ({"alpha": 8}, "lora.alpha: 8.0, and the adapter in .* has 4.0"),
    ({"rslora": True}, "lora.rslora: True, and the adapter in .* has False"),
    ({"targets": ("q_proj", "k_proj", "v_proj")}, "lora.targets: .* does not adapt .*k_proj"),
]


def test_other_shape_of_an_adapter_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def on_rank() -> None:
        for changed, message in REFUSED:
            config = settings(folder, **changed).model_copy(update={"output": tmp_path / "run"})
            with pytest.raises(ConfigError, match=message):
                train(config, resume=folder / "run")

    run_distributed(on_rank, 1, init=False, timeout_s=DEADLINE_S)


def test_learning_rate_and_schedule_of_an_adapter_are_those_of_the_resumed_run(folder: Path, tmp_path: Path) -> None:
    changed = {"optimizer": {"lr": 0.002}, "schedule": {"kind": "linear", "total_steps": 4}}
    resume(settings(folder, **changed), tmp_path / "run")
    rows = metrics(tmp_path / "run")
    # Linear from 0.002 to 0 over four steps, of which the run takes the last two.
    assert [(row["step"], row["lr"]) for row in rows] == [(3, pytest.approx(0.001)), (4, pytest.approx(0.0005))]


def test_dropout_of_an_adapter_is_that_of_the_resumed_run(folder: Path, tmp_path: Path) -> None:
    resume(settings(folder, dropout=0.25), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.25
