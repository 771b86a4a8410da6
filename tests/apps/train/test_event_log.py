"""The event log of a run, and directories that it must not write to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascend.apps.train.event_log import EventLog
from megascend.apps.train.run_report import read_run
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.errors import CheckpointError, DataError
from megascend.runtime.distributed.launch import Launch
from megascend.testing.parity import case_checkpoint


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_truncated_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "sa')
    EventLog(tmp_path, Launch()).event("saved")
    assert (tmp_path / "events.jsonl").read_text().splitlines()[1] == '{"event": "sa'
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[2])["event"] == "saved"


def test_error_is_recorded_once_by_its_rank(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path, Launch(rank=3, world_size=4, attempt=2))
    event_log.start()
    with pytest.raises(DataError), event_log.recording_errors(lambda: 0), event_log.recording_errors(lambda: 7):
        raise DataError("line 7 is empty")
    assert [path.name for path in (tmp_path / "errors").iterdir()] == ["attempt-2-rank-3.json"]
    (record,) = lines(tmp_path / "errors" / "attempt-2-rank-3.json")
    assert (record["rank"], record["world_size"], record["step"], record["started"]) == (3, 4, 7, True)
    assert (record["error"], record["message"]) == ("DataError", "line 7 is empty")
    assert "test_event_log.py" in record["traceback"]


@pytest.fixture
def config(parity_folder: Path, tmp_path: Path) -> RunConfig:
    """Return a run with invalid data and a model without a tokenizer, which is detected first."""
    (tmp_path / "chat.jsonl").write_text('{"messages": "none"}\n')
    model = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)
    data = {"path": tmp_path / "chat.jsonl"}
    return RunConfig(model=model, output=tmp_path / "run", data=data, platform="cpu", precision="fp32", plot=False)


@pytest.mark.usefixtures("runtime")
def test_errors_before_the_first_step_are_recorded_without_a_run(config: RunConfig) -> None:
    for _ in range(2):  # the directory is accepted the second time
        with pytest.raises(CheckpointError, match="vocabulary is missing"):
            train(config)
    assert list(files(config.output)) == ["errors/attempt-0-rank-0.json"]
    for record in lines(config.output / "errors" / "attempt-0-rank-0.json"):
        assert (record["error"], record["step"], record["started"]) == ("CheckpointError", 0, False)
    assert [attempt.outcome for attempt in read_run(config.output).attempts] == ["error", "error"]


def test_events_wait_while_the_directory_holds_another_run(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path / "run", Launch(), active=False)
    event_log.start(hold=True, steps=3)
    event_log.event("evaluated", reward=float("nan"), parts=[float("inf"), {"a": (1.0, float("-inf"))}])
    assert not (tmp_path / "run").exists()
    event_log.write_pending()
    event_log.event("first_step")
    start, evaluated, first = lines(tmp_path / "run" / "events.jsonl")
    assert (start["event"], first["event"]) == ("start", "first_step")
    assert (evaluated["reward"], evaluated["parts"]) == (None, [None, {"a": [1.0, None]}])  # strict JSON
