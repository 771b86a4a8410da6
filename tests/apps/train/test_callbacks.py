"""Callbacks of real runs on two ranks: their calls and records, requests to save and to stop, and their exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train.learner import RunResult
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from support.runs import checkpoints, events, exported, losses, metrics, run_config, tiny_run, write_lines

DEADLINE_S = 240
EVENTS = ("on_start", "on_step", "on_evaluate", "on_save", "on_end")
FILE = """
import json
import megascend

class Recorder(megascend.Callback):
    def note(self, event, control, value):
        with open(f"{control.config.output}.calls", "a") as file:
            file.write(json.dumps([event, control.step, value]) + "\\n")

    def on_start(self, control):
        self.note("on_start", control, None)

    def on_step(self, control, record):
        self.note("on_step", control, record)

    def on_evaluate(self, control, record):
        self.note("on_evaluate", control, record)

    def on_save(self, control, path):
        assert (path / "megascend.json").is_file()
        self.note("on_save", control, path.name)

    def on_end(self, control, result):
        self.note("on_end", control, [result.steps, str(result.export), result.stopped])

class Stop(megascend.Callback):
    def on_step(self, control, record):
        control.should_training_stop = record["step"] == 3

class Save(megascend.Callback):
    def on_step(self, control, record):
        control.should_save = record["step"] == 2

class Unknown(megascend.Callback):
    def on_step_end(self, *_):
        pass

class Other:
    pass

def failing(event):
    def method(self, control=None, *_):
        if event != "on_step" or control.step == 3:
            raise KeyError("no such figure: " + 40 * "far too long ")
    return type("Failing", (megascend.Callback,), {event: method})

""" + "\n".join(f"Failing{event} = failing({event!r})" for event in ("__init__", *EVENTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_imported: object) -> Path:
    folder = tiny_run(tmp_path_factory.mktemp("callbacks"), (f"number {n}" for n in range(9)))
    write_lines(folder / "held_out.jsonl", ({"text": f"number {100 + n}"} for n in range(9)))
    (folder / "mine.py").write_text(FILE)
    return folder


def settings(folder: Path, output: Path, *callbacks: str, **changes: Any) -> RunConfig:
    names = [f"{folder / 'mine.py'}:{name}" for name in callbacks]
    return run_config(folder, output, **({"callbacks": names, "steps": 5, "export": True} | changes))


def train_on_two_ranks(config: RunConfig, resume: str | None = None) -> list[RunResult[Any]]:
    return run_distributed(lambda: train(config, resume=resume), 2, init=False, timeout_s=DEADLINE_S)


@pytest.fixture(scope="module")
def reference(folder: Path) -> RunConfig:
    """Train without callbacks."""
    config = settings(folder, folder / "reference")
    train_on_two_ranks(config)
    return config


def assert_equal(config: RunConfig, reference: RunConfig) -> None:
    assert losses(config.output) == losses(reference.output)
    assert exported(config.output) == exported(reference.output)


def test_calls_are_in_order_with_the_lines_of_the_metrics(folder: Path, tmp_path: Path, reference: RunConfig) -> None:
    validation = {"path": folder / "held_out.jsonl", "every": 2}
    checkpoint = {"every": 2, "asynchronous": False}
    config = settings(folder, tmp_path / "run", "Recorder", validation=validation, checkpoint=checkpoint)
    train_on_two_ranks(config)
    calls = [json.loads(line) for line in (tmp_path / "run.calls").read_text().splitlines()]
    first, second, third, fourth, fifth = metrics(config.output)
    assert second["validation_loss"] is not None
    assert calls == [
        ["on_start", 0, None],
        ["on_step", 1, first],
        ["on_step", 2, second],
        ["on_evaluate", 2, second],
        ["on_step", 3, third],
        ["on_save", 3, "step-00000002"],  # the ranks agree after a step that the checkpoint before it is complete
        ["on_step", 4, fourth],
        ["on_evaluate", 4, fourth],
        ["on_step", 5, fifth],
        ["on_evaluate", 5, fifth],
        ["on_save", 5, "step-00000004"],
        ["on_save", 5, "step-00000005"],
        ["on_end", 5, [5, str(config.output / "hf"), None]],
    ]
    assert_equal(config, reference)


def test_stopped_run_is_saved_and_resumes_bitwise_equal(folder: Path, tmp_path: Path, reference: RunConfig) -> None:
    config = settings(folder, tmp_path / "run", "Recorder", "Stop")
    name = f"callback {folder / 'mine.py'}:Stop"
    for result in train_on_two_ranks(config):
        assert (result.steps, result.export, result.stopped) == (3, None, name)
    assert checkpoints(config.output) == [3]
    assert losses(config.output) == losses(reference.output)[:3]
    assert [(event["step"], event["signal"]) for event in events(config.output, "stopped")] == [(3, name)]
    assert all(result.stopped is None for result in train_on_two_ranks(config, resume="auto"))
    assert_equal(config, reference)
    calls = [json.loads(line) for line in (tmp_path / "run.calls").read_text().splitlines()]
    assert [(event, step) for event, step, _ in calls] == [
        *[("on_start", 0), ("on_step", 1), ("on_step", 2), ("on_step", 3), ("on_save", 3), ("on_end", 3)],
        *[("on_start", 3), ("on_step", 4), ("on_step", 5), ("on_end", 5)],
    ]


def test_steps_to_come_cost_no_time_at_the_start(folder: Path, tmp_path: Path) -> None:
    # Their two billion draws would exceed the deadline.
    config = settings(folder, tmp_path / "run", "Stop", steps=10**9)
    (result,) = run_distributed(lambda: train(config), 1, init=False, timeout_s=DEADLINE_S)
    assert result.steps == 3


def test_requested_checkpoint_is_the_only_one(folder: Path, tmp_path: Path, reference: RunConfig) -> None:
    config = settings(folder, tmp_path / "run", "Save")
    train_on_two_ranks(config)
    assert checkpoints(config.output) == [2]
    assert_equal(config, reference)


@pytest.mark.parametrize(
    ("event", "saved"),
    [
        pytest.param("__init__", [], marks=pytest.mark.nightly),  # covered: on_start
        ("on_start", []),
        ("on_step", [3]),
        pytest.param("on_evaluate", [2], marks=pytest.mark.nightly),  # covered: on_step
        ("on_save", [2, 4]),  # known after step 3, stopped after the next one
        ("on_end", [4, 5]),
    ],
)
def test_exception_names_the_callback_on_every_rank_and_keeps_the_step(
    folder: Path, tmp_path: Path, reference: RunConfig, event: str, saved: list[int]
) -> None:
    changes: dict[str, Any] = {"validation": {"path": folder / "held_out.jsonl", "every": 2}}
    if event in ("on_save", "on_end"):
        changes["checkpoint"] = {"every": 2, "asynchronous": False}
    config = settings(folder, tmp_path / "run", f"Failing{event}", **changes)

    def on_rank() -> str:
        with pytest.raises(ConfigError) as raised:
            train(config)
        return str(raised.value)

    first, second = run_distributed(on_rank, 2, init=False, timeout_s=DEADLINE_S)
    assert first == second
    assert first.startswith(f"callback {folder / 'mine.py'}:Failing{event}: {event} raised KeyError: 'no such")
    assert len(first) == 160
    assert checkpoints(config.output) == saved
    (record,) = (config.output / "errors").glob("*-rank-0.json")
    assert "KeyError: 'no such figure" in json.loads(record.read_text())["traceback"]
    if event in ("on_step", "on_save"):
        corrected = config.model_copy(update={"callbacks": ()})
        train_on_two_ranks(corrected, resume="auto")
        assert_equal(corrected, reference)
