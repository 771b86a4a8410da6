"""Settings as commented YAML and as JSON Schema: what ``show-config --defaults`` and ``--schema`` print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megascend.config import RunConfig, load_config, read_settings
from megascend.config.commented import default_settings, json_schema
from megascend.config.rl import RlConfig
from megascend.config.section import Section
from megascend.config.serve import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
KINDS: dict[str, type[Section]] = {"train": RunConfig, "rl": RlConfig, "serve": ServeConfig}
VALID = {"model": "m", "output": "o", "data": {"path": "d.jsonl"}}


def test_defaults_are_a_run_file_once_required_settings_are_filled_in(tmp_path: Path) -> None:
    text = default_settings(RunConfig, "title")
    model = (
        "# Hugging Face checkpoint directory (safetensors), or a name on the Hub: owner/name@revision [path]\nmodel:"
    )
    assert text.startswith(f"# title\n\n{model}  # required\n")
    values = yaml.safe_load(text)
    assert (values["model"], values["output"], values["data"]["path"]) == (None, None, None)
    for setting, value in (("model", "m"), ("output", "o")):
        text = text.replace(f"{setting}:  # required", f"{setting}: {value}", 1)
    # Either path or sources is required.
    text = text.replace("  path: null", "  path: d.jsonl", 1)
    (tmp_path / "all.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(VALID), encoding="utf-8")
    assert load_config(tmp_path / "all.yaml") == load_config(tmp_path / "few.yaml")


def test_optional_section_can_be_uncommented(tmp_path: Path) -> None:
    text = default_settings(RunConfig, "title")
    start = text.index("# lora:\n")
    block = text[start : text.index("\n\n", start)]
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(VALID) + "".join(line[2:] + "\n" for line in block.splitlines()), encoding="utf-8"
    )
    lora = load_config(tmp_path / "run.yaml").lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.optimizer) == (16, 32.0, None)


@pytest.mark.parametrize("command", KINDS)
def test_defaults_have_a_comment_above_every_setting(command: str) -> None:
    lines = default_settings(KINDS[command], "title").splitlines()
    settings = [index for index, line in enumerate(lines) if re.match(r"^(# )*  *\w+:|^\w+:", line)]
    assert len(settings) > 50
    assert [lines[index] for index in settings if "#" not in lines[index - 1]] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_schema_accepts_the_examples(path: Path) -> None:
    kind = RlConfig if path.parent.name == "rl" else RunConfig
    validator = schema_validator(kind)
    assert [error.message for error in validator.iter_errors(read_settings(path))] == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"learning_rate": 1e-4}, []),
        ({"optimizer": {"learning_rate": 1e-4}}, ["optimizer"]),
        ({"precision": "int8"}, ["precision"]),
        ({"optimizer": {"lr": -1}}, ["optimizer", "lr"]),
        ({"optimizer": {"betas": [0.9]}}, ["optimizer", "betas"]),
        ({"steps": True}, ["steps"]),
        ({"lora": {"rank": 0}}, ["lora"]),
        ({"schedule": {"kind": "step"}}, ["schedule", "kind"]),
        ({"data": {}}, ["data"]),
        ({"data": None}, ["data"]),
    ],
)
def test_schema_refuses_what_the_run_file_refuses(change: dict[str, Any], path: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(VALID | change), encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.yaml"):  # ConfigError is one
        load_config(tmp_path / "run.yaml")
    errors = [*schema_validator(RunConfig).iter_errors(VALID | change)]
    assert [list(error.absolute_path) for error in errors] == [path]


def schema_validator(kind: type[Section]) -> Any:
    schema = json_schema(kind, "title")
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"] == "title"
    return jsonschema.Draft202012Validator(schema)
