"""``megascend init``: run files that train as they stand, with a planned layout, a schema for editors, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
import yaml

from megascend.apps.train.run_template import TASKS
from megascend.config.rl import load_rl_config
from support.runs import metrics

CPU = ("--set", "platform=cpu")
"""On a machine with GPUs too."""


# Covered: the runs by test_cli_train_heads.py, test_cli_train_dpo.py and sft, the files by their schemas.
@pytest.mark.nightly_cases("classification-3", "reward-1", "dpo-1", "pretrain-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "steps"), [("sft", 3), ("dpo", 1), ("reward", 1), ("classification", 3), ("pretrain", 1)]
)
def test_run_file_trains_to_the_end_as_it_stands(
    megascend, small_model: Path, tmp_path: Path, task: str, steps: int
) -> None:
    completed = megascend("init", task, small_model, *CPU, cwd=tmp_path)
    assert f"run.yaml: {TASKS[task].title}; beside it data.jsonl" in completed.stdout
    megascend("train", "run.yaml", "--dry-run", cwd=tmp_path)
    megascend("train", "run.yaml", cwd=tmp_path)
    rows = metrics(tmp_path / "runs" / task)
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    # A model of random weights: all tokens, or labels, are about equally likely, and no answer is preferred to another.
    vocabulary = json.loads((small_model / "config.json").read_text())["vocab_size"]
    expected = math.log(2) if task in ("dpo", "reward", "classification") else math.log(vocabulary)
    assert rows[0]["loss"] == pytest.approx(expected, abs=1e-3 if task == "dpo" else 0.2)
    assert (tmp_path / "runs" / task / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_run_file_of_rl_samples_and_takes_a_step(megascend, small_model: Path, tmp_path: Path) -> None:
    settings = ("--set", "engine=single", "--set", "rollout.max_tokens=4", *CPU)
    megascend("init", "rl", small_model, *settings, cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "prompts.jsonl", "reward.py"}
    megascend("rl", "run.yaml", "--dry-run", cwd=tmp_path)
    # Every response of this model gets the reward 0: groups of equal rewards would be dropped.
    one_step = ("--set", "steps=1", "--set", "rollout.drop_equal=false")
    megascend("rl", "run.yaml", *one_step, cwd=tmp_path)
    assert [row["step"] for row in metrics(tmp_path / "runs" / "rl")] == [1]


def test_layout_is_that_of_a_plan(megascend, small_model: Path, tmp_path: Path) -> None:
    arguments = ("--cards", "4", "--length", "256", "--batch", "8", "--lora", "4", *CPU)
    megascend("init", "sft", small_model, *arguments, cwd=tmp_path)
    plan = ("--cards", "4", "--length", "256", "--batch", "8", "--lora", "4", "--json")
    planned = json.loads(megascend("plan", small_model, *plan).stdout)["layouts"][0]["settings"]
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert values.get("parallel", {}) == planned.get("parallel", {})
    assert values["batching"]["micro_batch_tokens"] == planned["batching"]["micro_batch_tokens"]
    assert values["lora"] == {"rank": 4, "alpha": 8}
    text = (tmp_path / "run.yaml").read_text().replace("\n# ", " ")  # comments are wrapped
    assert "Planned for 4 x NVIDIA H100 SXM 80GB: " in text
    assert "predicted (not measured)" in text
    assert "Only the model's configuration" not in text
    megascend("train", "run.yaml", "--dry-run", "--nproc", "4", cwd=tmp_path)


def test_rl_on_a_node_is_divided_between_engines_and_trainer(megascend, small_model: Path, tmp_path: Path) -> None:
    megascend("init", "rl", small_model, "--cards", "4", "--device", "h200", cwd=tmp_path)
    config = load_rl_config(tmp_path / "run.yaml")
    assert config.placement.trainer is not None
    assert config.placement.engines is not None
    assert {*config.engines} == {"vllm"}
    used = [*config.placement.trainer, *(gpu for engine in config.placement.engines for gpu in engine)]
    assert sorted(used) == [*range(4)]
    assert f"--nproc {len(config.placement.trainer)}" in (tmp_path / "run.yaml").read_text()


def test_missing_data_are_named(megascend, small_model: Path, tmp_path: Path) -> None:
    completed = megascend("init", "sft", small_model, "--data", "none.jsonl", cwd=tmp_path)
    assert "none.jsonl: no data is there yet" in completed.stderr


@pytest.mark.parametrize("task", TASKS)
def test_schema_beside_the_run_file_accepts_it(megascend, small_model: Path, tmp_path: Path, task: str) -> None:
    megascend("init", task, small_model, "runs/run.yaml", "--schema", cwd=tmp_path)
    text = (tmp_path / "runs" / "run.yaml").read_text()
    first, _, _ = text.partition("\n")
    schema = tmp_path / "runs" / first.removeprefix("# yaml-language-server: $schema=")
    assert schema.name == f"{TASKS[task].command}.schema.json"
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []
    assert [*validator.iter_errors(yaml.safe_load(text) | {"learning_rate": 1})]
