"""Trackers with the packages that they are for, offline: a run, stopped and resumed, is one run with all its figures.

Nightly, and skipped where a package is missing: the four of them take half a gigabyte and 40 s of processor time for what an
upstream release alone can break. ``pip install 'megascend[wandb,swanlab,trackio,mlflow]'`` brings them.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from megascend.apps.tracking.trackers import FOLDER, Trackers, read_run_ids

CONFIG = {"seed": 1234, "optimizer": {"lr": 1e-5, "betas": [0.9, 0.999]}, "lora": None}
ROLLOUTS = [
    {"step": 4, "reward": 1.5, "rewards/right": 1.0, "prompt": "1+1=", "response": "2"},
    {"step": 4, "reward": 0.0, "prompt": "1+1=", "response": "three"},
]
LOSSES = {1: 4.0, 2: 2.0, 3: 1.0, 4: 0.5}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed: pip install 'megascend[{package}]'"
    )


def log_and_resume(tracker: str, output: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log steps 1 and 2, then 3 and 4 as if in another process; return both run ids."""
    ids = []
    for last_step, outcome in ((0, "stopped"), (2, "finished")):
        trackers = Trackers({tracker: {}}, output, CONFIG, last_step)
        for step in (last_step + 1, last_step + 2):
            trackers.log(step, {"loss": LOSSES[step], "validation_loss": None, "tokens": 10 * step})
        trackers.log_texts(last_step + 2, {"one?": f"answer {last_step + 2}"})
        if last_step:
            trackers.log_rollouts(last_step + 2, ROLLOUTS)
        trackers.close(outcome)
        ids.append(read_run_ids(output / FOLDER)[tracker])
    assert [record.getMessage() for record in caplog.records if record.name.startswith("megascend")] == []
    assert ids[0] == ids[1]
    return ids


@pytest.mark.nightly
@needs("wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_and_resume("wandb", tmp_path, caplog)
    losses, settings, answers, rollouts = {}, {}, [], []
    files = sorted((tmp_path / FOLDER / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # of one run: offline, every process has a file
    assert len({path.name for path in files}) == 1
    for path in files:
        for record in wandb_records(path):
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "train/loss" in row:
                losses[row["_step"]] = row["train/loss"]
            for item in record.run.config.update:
                settings[item.key] = json.loads(item.value_json)
        tables = {file.name: json.loads(file.read_text()) for file in path.parent.rglob("*.table.json")}
        answers += [table["data"] for name, table in tables.items() if name.startswith("generation")]
        rollouts += [table for name, table in tables.items() if name.startswith("rollouts")]
    assert losses == LOSSES
    assert (settings["seed"], settings["optimizer"]["lr"]) == (1234, 1e-5)
    assert answers == [[[2, "one?", "answer 2"]], [[4, "one?", "answer 4"]]]
    [table] = rollouts
    assert table["columns"] == ["step", "reward", "rewards/right", "prompt", "response"]
    assert table["data"] == [[4, 1.5, 1.0, "1+1=", "2"], [4, 0.0, None, "1+1=", "three"]]


def wandb_records(path: Path) -> list:
    """Parse W&B's file, a LevelDB log: blocks of 32 KiB, whose records begin with a checksum, a length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, part, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if room < 7 or kind == 0:
            position += room
            continue
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(part))
            part = b""
    return records


@pytest.mark.nightly
@needs("swanlab")
def test_swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    log_and_resume("swanlab", tmp_path, caplog)
    runs = sorted((tmp_path / FOLDER / "swanlab").glob("run-*"))
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1
    texts = [path.read_text() for run in runs for path in run.glob("media/**/*.txt")]
    assert sorted(texts) == ["2", "answer 2", "answer 4", "three"]
    content = b"".join(path.read_bytes() for run in runs for path in run.glob("*.swanlab"))
    assert b"train/loss" in content
    assert b"train/validation_loss" not in content
    assert any("lr: 1.0e-05" in path.read_text() for run in runs for path in run.glob("files/config.yaml"))


@pytest.mark.nightly
@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    import trackio.sqlite_storage as storage  # has read where its files are, if it was imported before

    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "database", raising=False)
    log_and_resume("trackio", tmp_path / "run", caplog)
    [path] = (tmp_path / "database").rglob("megascend.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        settings = [json.loads(text) for (text,) in database.execute("select config from configs")]
    figures = [(name, step, json.loads(values)) for name, step, values in rows]
    assert {step: values["train/loss"] for _, step, values in figures if "train/loss" in values} == LOSSES
    assert {name for name, _, _ in figures} == {"run"}
    assert "answer 4" in str(figures[-2][2])
    assert "reward 1.5" in str(figures[-1][2])
    assert "three" in str(figures[-1][2])
    assert settings[0]["optimizer"]["lr"] == 1e-5


@pytest.mark.nightly
@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)  # artifacts go to ./mlruns
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_id = log_and_resume("mlflow", tmp_path / "run", caplog)[0]
    from mlflow import MlflowClient

    client = MlflowClient()
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert {metric.step: metric.value for metric in client.get_metric_history(run_id, "train/loss")} == LOSSES
    assert (run.data.params["optimizer.lr"], run.data.params["lora"]) == ("1e-05", "None")
    assert "answer 4" in Path(client.download_artifacts(run_id, "generation/step-4.txt", str(tmp_path))).read_text()
    table = json.loads(Path(client.download_artifacts(run_id, "rollouts/step-4.json", str(tmp_path))).read_text())
    assert table["columns"] == ["step", "reward", "rewards/right", "prompt", "response"]
    assert table["data"][0] == [4, 1.5, 1.0, "1+1=", "2"]
    assert table["data"][1][3:] == ["1+1=", "three"]
