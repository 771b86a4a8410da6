"""``megascend show-config``: merged settings, all defaults with comments, JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

RUN_FILE = "model: m\noutput: o\ndata: {path: d.jsonl}\n"


def test_short_name_is_reported_beside_valid_yaml(megascend, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    completed = megascend("show-config", "run.yaml", "--set", "lr=1e-4", cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == "--set lr=1e-4 sets optimizer.lr\n"
    assert yaml.safe_load(completed.stdout)["optimizer"]["lr"] == 1e-4


def test_short_name_is_reported_by_the_first_rank_only(megascend, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    ranks = [
        megascend("show-config", "run.yaml", "--set", "lr=1e-4", cwd=tmp_path, RANK=rank, WORLD_SIZE="2")
        for rank in ("0", "1")
    ]
    assert [completed.stderr for completed in ranks] == ["[rank 0] --set lr=1e-4 sets optimizer.lr\n", ""]


@pytest.mark.parametrize(("command", "required"), [("train", "data"), ("rl", "rollout"), ("serve", "model")])
def test_defaults_are_yaml_and_schema_is_json(megascend, command: str, required: str) -> None:
    defaults = megascend("show-config", "--defaults", command)
    assert defaults.returncode == 0, defaults.stderr
    assert defaults.stdout.startswith(f"# Settings of megascend {command}, with their defaults.")
    schema = megascend("show-config", "--schema", command)
    assert schema.returncode == 0, schema.stderr
    content = json.loads(schema.stdout)
    assert required in content["required"]
    assert yaml.safe_load(defaults.stdout).keys() <= content["properties"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "show-config takes one of CONFIG, --defaults COMMAND and --schema COMMAND"),
        (("run.yaml", "--schema", "train"), "show-config takes one of CONFIG"),
        (("--defaults", "train", "--set", "lr=1"), "--set and --nproc need CONFIG: --defaults reads no file"),
        (("--schema", "trian"), "'trian' is not one of 'train', 'rl', 'serve'"),
    ],
)
def test_wrong_combination_is_refused(megascend, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    completed = megascend("show-config", *arguments, cwd=tmp_path)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert message in completed.stderr
