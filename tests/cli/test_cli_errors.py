"""What commands show, and what they say instead. All that can be wrong with their input is in ``test_bad_inputs.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
QUESTION = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]}


@pytest.fixture
def run_file(small_model: Path, tmp_path: Path) -> Path:
    """A run that would work."""
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


def test_an_earlier_run_is_not_overwritten(megascend, run_file: Path) -> None:
    earlier = run_file.parent / "out" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("precious\n")
    done = megascend("train", run_file, cwd=run_file.parent)
    assert done.returncode == 2
    assert "metrics.jsonl" in done.stderr
    assert "--overwrite" in done.stderr
    assert earlier.read_text() == "precious\n"


def test_debug_shows_the_traceback(megascend, run_file: Path) -> None:
    for done in (
        megascend("--debug", "show-config", run_file, "--set", "steps=0"),
        megascend("show-config", run_file, "--set", "steps=0", MEGASCEND_DEBUG="1"),
    ):
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "ConfigError" in done.stderr


def test_show_config_prints_what_train_reads(megascend, run_file: Path) -> None:
    done = megascend("show-config", run_file, "--nproc", "2", "--set", "parallel.tensor=2", cwd=run_file.parent)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["parallel"]["tensor"] == 2
    assert shown["optimizer"]["max_grad_norm"] == 1.0
    assert "# 2 ranks" in done.stdout
    again = run_file.parent / "again.yaml"
    again.write_text(done.stdout)
    assert yaml.safe_load(megascend("show-config", again).stdout) == shown


def test_show_config_prints_what_rl_reads(megascend, run_file: Path) -> None:
    example = ROOT / "examples" / "rl" / "sort_digits.yaml"
    done = megascend("show-config", example, "--set", "rollout.max_lag=2", cwd=run_file.parent)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["rollout"]["max_lag"], shown["objective"]["loss"], shown["engines"]) == (2, "ppo", ["local"])
    again = run_file.parent / "again.yaml"
    again.write_text(done.stdout)
    assert yaml.safe_load(megascend("show-config", again).stdout) == shown
    done = megascend("show-config", example, "--set", "rollout.max_lags=2", cwd=run_file.parent)
    assert done.returncode == 2
    assert "rollout.max_lags" in done.stderr


def test_show_config_without_a_model_says_so(megascend, run_file: Path) -> None:
    done = megascend("show-config", run_file, "--nproc", "2", "--set", "model=later", cwd=run_file.parent)
    assert done.returncode == 0
    assert "# layout not checked" in done.stdout


def test_export_says_what_it_found_instead(megascend, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    with_adapter = tmp_path / "lora"
    (with_adapter / "adapter").mkdir(parents=True)
    (with_adapter / "adapter" / "adapter_config.json").write_text("{}")
    found = {run: "run directory", tmp_path: "config.json", tmp_path / "no": "does not exist"}
    merging = "megascend export BASE OUT --adapter"
    for model, word in (found | {with_adapter: merging, with_adapter / "adapter": merging}).items():
        done = megascend("export", model, tmp_path / "exported")
        assert done.returncode == 2
        assert done.stderr.startswith("CheckpointError")
        assert word in done.stderr
    done = megascend("export", run, run)
    assert done.returncode == 2
    assert "not an empty directory" in done.stderr
