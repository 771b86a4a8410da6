"""``megascend show-config``: merged settings, all defaults with comments, JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

RUN_FILE = "model: m\noutput: o\ndata: {path: d.jsonl}\n"


@pytest.mark.parametrize(("command", "required"), [("train", "data"), ("rl", "rollout"), ("serve", "model")])
def test_defaults_are_yaml_and_schema_is_json(megascend, command: str, required: str) -> None:
    defaults = megascend("show-config", "--defaults", command)
    assert defaults.stdout.startswith(f"# Settings of megascend {command}, with their defaults.")
    schema = megascend("show-config", "--schema", command)
    content = json.loads(schema.stdout)
    assert required in content["required"]
    assert yaml.safe_load(defaults.stdout).keys() <= content["properties"].keys()


def test_show_config_prints_what_train_reads(megascend, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE.replace("model: m", f"model: {small_model}"))
    completed = megascend("show-config", "run.yaml", "--nproc", "2", "--set", "parallel.tensor=2", cwd=tmp_path)
    printed = yaml.safe_load(completed.stdout)
    assert printed["parallel"]["tensor"] == 2
    assert printed["optimizer"]["max_grad_norm"] == 1.0
    assert "# 2 ranks" in completed.stdout
    repeated = tmp_path / "again.yaml"
    repeated.write_text(completed.stdout)
    assert yaml.safe_load(megascend("show-config", repeated).stdout) == printed


def test_debug_shows_the_traceback(megascend, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    command = ("show-config", "run.yaml", "--set", "steps=0")
    for completed in (
        megascend("--debug", *command, cwd=tmp_path, code=1),
        megascend(*command, cwd=tmp_path, code=1, MEGASCEND_DEBUG="1"),
    ):
        assert "Traceback" in completed.stderr
        assert "ConfigError" in completed.stderr
