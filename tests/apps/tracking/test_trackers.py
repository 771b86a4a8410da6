"""Trackers by name: their calls, refusals before training, and failures that do not end a run."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.tracking import TrackedRun
from megascend.apps.tracking import tracker as registry
from megascend.apps.tracking.tracker import check_trackers, register_tracker
from megascend.apps.tracking.trackers import BackgroundTracker, Trackers
from megascend.apps.train.preflight import check_packages
from megascend.config import Data, RunConfig
from megascend.errors import ConfigError, MissingDependencyError

ROW = {
    "step": 3,
    "loss": 0.5,
    "validation_loss": None,
    "skipped": False,
    "tokens": 7,
    "mfu": float("nan"),
    "rewards": {"right": 0.25, "unknown": None},
}
ROLLOUTS = [
    {"step": 3, "reward": 1.2, "rewards/right": 1.0, "engine": "", "prompt": "1+1=", "response": "<b>2</b>\n| done"},
    {"step": 3, "reward": 0.0, "engine": "vllm 0", "prompt": "1+1=", "response": "3"},
]


class RecordingTracker:
    """Tracker that records its calls."""

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.calls = run, []
        self.run_id: str | None = run.run_id or "run-1"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step in self.run.options.get("fails_at", ()):
            raise OSError("no network")
        self.calls.append((step, dict(figures)))

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.calls.append((step, dict(texts)))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append((step, [dict(row) for row in rows]))

    def close(self, outcome: str) -> None:
        self.calls.append(outcome)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordingTracker]]:
    """List the opened trackers named ``kept``."""
    trackers: list[RecordingTracker] = []

    def open_kept(run: TrackedRun) -> RecordingTracker:
        if run.options.get("refuses"):
            raise RuntimeError("not logged in")
        trackers.append(RecordingTracker(run))
        return trackers[-1]

    monkeypatch.setitem(registry.TRACKERS, "kept", registry.TrackerEntry(open_kept))
    return trackers


def config(path: Path, *trackers: object, **changes: object) -> RunConfig:
    return RunConfig(model=path, output=path, data=Data(path=path), plot=False, trackers=trackers, **changes)


def test_trackers_are_named_with_options_or_without(tmp_path: Path) -> None:
    settings = config(tmp_path, "mlflow", {"wandb": {"project": "mine"}}, tensorboard=True)
    assert settings.tracker_options == {"tensorboard": {}, "mlflow": {}, "wandb": {"project": "mine"}}
    assert config(tmp_path).tracker_options == {}


def test_an_unknown_name_and_a_missing_package_are_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"unknown tracker 'wandbb', did you mean wandb\? Known: tensorboard, wandb"):
        check_packages(config(tmp_path, "wandbb"))
    monkeypatch.setattr(registry, "is_installed", lambda name: False)
    for name, extra in (("tensorboard", "track"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        with pytest.raises(
            MissingDependencyError, match=rf"{name} needs {name}.*megascend\[{extra}\].*leave {name} out"
        ):
            check_packages(config(tmp_path, name))
    # A plug-in may register it: where it is imported, not before any process is started.
    check_packages(config(tmp_path, "mine", plugins=["package"]), plugins_pending=True)
    with pytest.raises(ConfigError, match="unknown tracker 'mine'"):
        check_packages(config(tmp_path, "mine", plugins=["package"]))


def test_a_tracker_gets_the_numbers_of_the_run_log(opened: list[RecordingTracker], tmp_path: Path) -> None:
    check_trackers(["kept"])
    with pytest.raises(ConfigError, match="another tracker is called 'kept'"):
        register_tracker("kept", RecordingTracker)
    trackers = Trackers({"kept": {"a": 1}}, tmp_path / "run-7", {"seed": 5})
    assert not (tmp_path / "run-7").exists()  # a run that does not start leaves nothing
    trackers.log(3, ROW)
    trackers.log_texts(3, {"one?": "two"})
    trackers.log_rollouts(3, ROLLOUTS)
    trackers.close("finished")
    [tracker] = opened
    figures = {"train/loss": 0.5, "train/skipped": 0.0, "train/tokens": 7.0, "train/rewards/right": 0.25}
    assert tracker.calls == [(3, figures), (3, {"one?": "two"}), (3, ROLLOUTS), "finished"]
    assert (tracker.run.name, tracker.run.config, tracker.run.options) == ("run-7", {"seed": 5}, {"a": 1})
    assert tracker.run.folder.is_dir()


def test_a_tracker_without_a_table_gets_rollouts_as_texts(
    opened: list[RecordingTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RecordingTracker, "log_rollouts")
    trackers = Trackers({"kept": {}}, tmp_path, {})
    trackers.log_rollouts(3, ROLLOUTS)
    trackers.close("finished")
    texts = {
        "[step 3, reward 1.2, rewards/right 1] 1+1=": "<b>2</b>\n| done",
        "[step 3, reward 0, engine vllm 0] 1+1=": "3",
    }
    assert opened[0].calls == [(3, texts), "finished"]


def test_a_resumed_run_is_the_same_one_to_a_tracker(opened: list[RecordingTracker], tmp_path: Path) -> None:
    for last_step in (0, 3, 0):
        trackers = Trackers({"kept": {}}, tmp_path, {}, last_step)
        trackers.log(last_step + 1, ROW)
        trackers.close("stopped")
    assert [(tracker.run.resumed_after, tracker.run.run_id) for tracker in opened] == [
        (0, None),
        (3, "run-1"),
        (0, None),
    ]
    assert json.loads((tmp_path / "trackers" / "run_ids.json").read_text()) == {"kept": "run-1"}


def test_tracker_failure_is_logged_once_and_loses_no_further_record(
    opened: list[RecordingTracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = []
    trackers = Trackers({"kept": {"fails_at": (2, 3)}}, tmp_path, {}, on_failure=lambda *call: events.append(call))
    for step in (1, 2, 3, 4):
        trackers.log(step, {"loss": 1.0})
    trackers.close("finished")
    assert [call[0] for call in opened[0].calls[:-1]] == [1, 4]
    assert events == [("kept", "OSError: no network")]
    assert [record.getMessage() for record in caplog.records] == [
        "tracker kept: OSError: no network; training continues", "tracker kept: 2 records were lost",
    ]  # fmt: skip


def test_a_tracker_that_cannot_be_opened_ends_nothing(
    opened: list[RecordingTracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers({"kept": {"refuses": True}}, tmp_path, {})
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0})
    trackers.close("finished")
    assert "it cannot be opened: RuntimeError: not logged in; training continues" in caplog.text
    assert "3 records were lost" in caplog.text
    assert opened == []


def test_hung_tracker_does_not_block_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    released, problems = threading.Event(), []

    class Hanging(RecordingTracker):
        def log(self, step: int, figures: Mapping[str, float]) -> None:
            released.wait(60)

    run = TrackedRun("run", tmp_path, {})
    tracker = BackgroundTracker(
        "slow", Hanging, run, lambda *_: None, lambda _, problem: problems.append(problem), waiting=4
    )
    for step in range(20):
        tracker.log(step, {})
    assert problems == ["its queue of 4 records is full"]
    with caplog.at_level(logging.WARNING):
        tracker.close("finished", timeout_s=0.2)
    assert "not finished after" in caplog.text
    released.set()


def test_tensorboard_holds_the_figures_the_settings_and_the_answers(tmp_path: Path) -> None:
    for last_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):  # resumed after step 2: step 3 of before is gone
        trackers = Trackers({"tensorboard": {}}, tmp_path, {"seed": 5}, last_step)
        for step in steps:
            trackers.log(step, {"loss": 1.0 / step + last_step})
        trackers.log_texts(steps[-1], {"one?": "two"})
        trackers.log_rollouts(steps[-1], ROLLOUTS)
        trackers.close("finished")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3 + 2, 4: 0.25 + 2}, rel=1e-5)
    [settings] = events.Tensors("config/text_summary")
    assert b'"seed": 5' in settings.tensor_proto.string_val[0]
    answers = events.Tensors("generation/0/text_summary")
    assert [(event.step, b"two" in event.tensor_proto.string_val[0]) for event in answers][-1] == (4, True)
    text = events.Tensors("rollouts/text_summary")[-1].tensor_proto.string_val[0].decode()
    # As code, in which Markdown and HTML of a response have no effect.
    assert (
        "**step 3, reward 1.2, rewards/right 1**\n\n    1+1=\n\nresponse:\n\n    <b>2</b>\n    | done\n\n**step 3"
        in text
    )
