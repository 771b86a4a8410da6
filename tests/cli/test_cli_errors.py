"""What is wrong with a run is one line on stderr, exit code 2, in seconds, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
QUESTION = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]}


@pytest.fixture
def run_file(small_model: Path, tmp_path: Path) -> Path:
    """A run that would work."""
    (tmp_path / "data.jsonl").write_text(json.dumps(QUESTION) + "\n")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": 3}\n{"messages": []}\n{"text": "caf\xe9"}\n')
    (tmp_path / "user.jsonl").write_text(json.dumps({"messages": QUESTION["messages"][:1]}) + "\n")
    (tmp_path / "link.jsonl").symlink_to("nowhere.jsonl")
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


# Overrides or number of processes -> the error's class, and what its line must name.
BAD_RUNS = {
    "unknown key": (["--set", "optimizer.learning_rate=1"], "ConfigError", ["optimizer.learning_rate", "unknown"]),
    "bad value": (["--set", "steps=0"], "ConfigError", ["steps", "0"]),
    "no override": (["--set", "steps"], "ConfigError", ["KEY=VALUE", "steps"]),
    "world size": (["--nproc", "3", "--set", "parallel.tensor=2"], "TopologyError", ["3", "parallel.tensor=2"]),
    "heads": (["--nproc", "8", "--set", "parallel.tensor=8"], "TopologyError", ["8", "parallel.tensor"]),
    "no model": (["--set", "model=nowhere"], "CheckpointError", ["nowhere"]),
    "no data": (["--set", "data.path=nowhere.jsonl"], "DataError", ["nowhere.jsonl", "data.path"]),
    "bad lines": (["--set", "data.path=bad.jsonl"], "DataError", ["3 problems in the data:"]),
    "lines without a turn": (["--set", "data.path=user.jsonl"], "DataError", ["user.jsonl:1", "no assistant turn"]),
    "a link to nothing": (["--set", "data.path=link.jsonl"], "DataError", ["link.jsonl", "nowhere.jsonl", "data.path"]),
    "no validation set": (["--set", "validation.path=nowhere.jsonl"], "DataError", ["nowhere.jsonl"]),
    "no template": (["--set", "data.chat_template=no.jinja"], "DataError", ["data.chat_template", "no.jinja"]),
    "too long": (
        ["--set", "batching.max_length=5"],
        "DataError",
        ["data.jsonl:1", "limit is 5", "batching.max_length"],
    ),
    "no such layer": (
        ["--set", "lora.targets=[q_proj, kproj]"],
        "ConfigError",
        ["lora.targets", "'kproj'", "down_proj", "k_proj"],
    ),
    "rank": (["--set", "lora.rank=0"], "ConfigError", ["lora.rank", "0"]),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_bad_run_is_one_line(megascend, run_file: Path, name: str) -> None:
    arguments, kind, named = BAD_RUNS[name]
    done = megascend("train", run_file, *arguments, cwd=run_file.parent)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith(kind)]
    assert all(word in line for word in named), line
    assert "Traceback" not in done.stderr
    # What a rank has found out itself is kept, and nothing else is left.
    assert {path.name for path in run_file.parent.glob("out/*")} <= {"errors"}


def test_a_damaged_checkpoint_is_found_before_processes_start(megascend, run_file: Path, small_model: Path) -> None:
    damaged = run_file.parent / "damaged"
    shutil.copytree(small_model, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = megascend("train", run_file, "--nproc", "2", "--set", f"model={damaged}", cwd=run_file.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("CheckpointError")
    assert "model.safetensors" in done.stderr


@pytest.mark.parametrize(
    ("removed", "named"),
    [
        ("tokenizer.json", ["CheckpointError", "tokenizer"]),
        ("chat_template.jinja", ["DataError", "data.jsonl:1", "need a chat template"]),
    ],
)
def test_a_model_that_cannot_read_is_found_before_it_is_built(
    megascend, run_file: Path, small_model: Path, removed: str, named: list[str]
) -> None:
    model = run_file.parent / "model"
    shutil.copytree(small_model, model)
    (model / removed).unlink()
    done = megascend("train", run_file, "--set", f"model={model}", cwd=run_file.parent)
    assert done.returncode == 2
    assert all(word in done.stderr for word in named), done.stderr
    assert "Traceback" not in done.stderr


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
