"""Output and errors of commands; ``test_bad_inputs.py`` covers all errors of their input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
QUESTION = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]}


@pytest.fixture
def run_file(small_model: Path, tmp_path: Path) -> Path:
    """Write a valid run file."""
    (tmp_path / "data.jsonl").write_text(json.dumps(QUESTION) + "\n")
    path = tmp_path / "run.yaml"
    settings = {
        "model": str(small_model),
        "output": "out",
        "data": {"path": "data.jsonl"},
        "steps": 1,
        "platform": "cpu",
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_earlier_run_is_not_overwritten(megascend, run_file: Path) -> None:
    earlier = run_file.parent / "out" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("precious\n")
    completed = megascend("train", run_file, cwd=run_file.parent)
    assert completed.returncode == 2
    assert "metrics.jsonl" in completed.stderr
    assert "--overwrite" in completed.stderr
    assert earlier.read_text() == "precious\n"


def test_debug_shows_the_traceback(megascend, run_file: Path) -> None:
    for completed in (
        megascend("--debug", "show-config", run_file, "--set", "steps=0"),
        megascend("show-config", run_file, "--set", "steps=0", MEGASCEND_DEBUG="1"),
    ):
        assert completed.returncode == 1
        assert "Traceback" in completed.stderr
        assert "ConfigError" in completed.stderr


def test_show_config_prints_what_train_reads(megascend, run_file: Path) -> None:
    completed = megascend("show-config", run_file, "--nproc", "2", "--set", "parallel.tensor=2", cwd=run_file.parent)
    assert completed.returncode == 0, completed.stderr
    printed = yaml.safe_load(completed.stdout)
    assert printed["parallel"]["tensor"] == 2
    assert printed["optimizer"]["max_grad_norm"] == 1.0
    assert "# 2 ranks" in completed.stdout
    repeated = run_file.parent / "again.yaml"
    repeated.write_text(completed.stdout)
    assert yaml.safe_load(megascend("show-config", repeated).stdout) == printed


def test_show_config_prints_what_rl_reads(megascend, run_file: Path) -> None:
    example = ROOT / "examples" / "rl" / "sort_digits.yaml"
    completed = megascend("show-config", example, "--set", "rollout.max_lag=2", cwd=run_file.parent)
    assert completed.returncode == 0, completed.stderr
    printed = yaml.safe_load(completed.stdout)
    assert (printed["rollout"]["max_lag"], printed["objective"]["loss"], printed["engines"]) == (2, "ppo", ["local"])
    repeated = run_file.parent / "again.yaml"
    repeated.write_text(completed.stdout)
    assert yaml.safe_load(megascend("show-config", repeated).stdout) == printed
    completed = megascend("show-config", example, "--set", "rollout.max_lags=2", cwd=run_file.parent)
    assert completed.returncode == 2
    assert "rollout.max_lags" in completed.stderr


def test_show_config_without_a_model_skips_the_layout(megascend, run_file: Path) -> None:
    completed = megascend("show-config", run_file, "--nproc", "2", "--set", "model=later", cwd=run_file.parent)
    assert completed.returncode == 0
    assert "# layout not checked" in completed.stdout


def test_export_error_names_the_kind_of_directory(megascend, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    with_adapter = tmp_path / "lora"
    (with_adapter / "adapter").mkdir(parents=True)
    (with_adapter / "adapter" / "adapter_config.json").write_text("{}")
    expected_words = {run: "run directory", tmp_path: "config.json", tmp_path / "no": "does not exist"}
    merging = "megascend export BASE OUT --adapter"
    for model, word in (expected_words | {with_adapter: merging, with_adapter / "adapter": merging}).items():
        completed = megascend("export", model, tmp_path / "exported")
        assert completed.returncode == 2
        assert completed.stderr.startswith("CheckpointError")
        assert word in completed.stderr
    completed = megascend("export", run, run)
    assert completed.returncode == 2
    assert "not an empty directory" in completed.stderr
