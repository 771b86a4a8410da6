"""The skeleton of a run: the phases of its start, and the checkpoint after an error."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megascend.apps.train.profile import StepProfiler
from megascend.apps.train.start_phases import StartPhases
from megascend.apps.train.supervised import SupervisedLearner
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.testing import run_distributed
from support.runs import losses, run_config, tiny_run

DEADLINE_S = 120


def test_runs_in_a_fork_collect_nothing_of_the_parent(folder: Path, tmp_path: Path) -> None:
    """Leave garbage whose destructor would wait, in a fork, for a thread that only the parent has."""
    collected = tmp_path / "collected"

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            with collected.open("a") as file:
                file.write(f"{os.getpid()}\n")

    def on_rank() -> None:
        for number in range(2):
            train(run_config(folder, tmp_path / f"run{number}", steps=1))

    gc.disable()
    try:
        Cycle()
        run_distributed(on_rank, 1, init=False, timeout_s=DEADLINE_S)
    finally:
        gc.enable()
    gc.collect()
    assert collected.read_text() == f"{os.getpid()}\n"


def test_phases_add_up_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, system, processor = [100.0], 1000.0, [2.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: system)
    monkeypatch.setattr(time, "process_time", lambda: processor[0])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 997.0))
    phases = StartPhases()
    clock[0] += 5.0
    phases.end("waiting")
    clock[0], processor[0] = clock[0] + 1.25, processor[0] + 1.0
    phases.end("computing")
    assert phases.seconds == {"Python": 3.0, "waiting": 5.0, "computing": 1.25}
    assert phases.processor_s == {"Python": 2.0, "waiting": 0.0, "computing": 1.0}
    assert phases.record() == {"seconds": phases.seconds, "processor_s": phases.processor_s}


def test_set_apart_moves_seconds_and_short_phases_are_omitted() -> None:
    phases = StartPhases()
    phases.seconds, phases.processor_s = {"torch": 3.0, "settings": 0.01, "model": 9.0}, {}
    phases.split_off("self-check", "model", 8.0)
    assert phases.seconds == {"torch": 3.0, "settings": 0.01, "model": 1.0, "self-check": 8.0}
    assert str(phases) == "12.0 s: torch 3.0, model 1.0, self-check 8.0"


# --- errors in the middle of a run ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_imported: object) -> Path:
    return tiny_run(tmp_path_factory.mktemp("errors"), (f"number {n}" for n in range(9)))


def settings(folder: Path, output: Path) -> RunConfig:
    return run_config(folder, output, steps=5)


@contextmanager
def failing_profiler(profiler: StepProfiler, number: int) -> Iterator[None]:
    yield
    if number == 3:
        raise OSError("the disk of the data is gone")


def fail_in(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: bool = False) -> None:
    """Make a callback of the run, or its profiler, raise at step ``number``, before or after its work."""
    if name == "profiler":
        monkeypatch.setattr(StepProfiler, "step", failing_profiler)
        return
    callback: Callable[..., Any] = getattr(SupervisedLearner, name)

    def failing(learner: SupervisedLearner, step: int, *rest: Any) -> Any:
        result = callback(learner, step, *rest) if after or step != number else None
        if step == number:
            raise OSError("the disk of the data is gone")
        return result

    monkeypatch.setattr(SupervisedLearner, name, failing)


def train_until_error(config: RunConfig, ranks: int = 1) -> list[str]:
    def on_rank() -> None:
        with pytest.raises(OSError, match="the disk of the data is gone"):
            train(config)

    run_distributed(on_rank, ranks, init=False, timeout_s=DEADLINE_S)
    return sorted(path.name for path in (config.output / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """Return the losses of a run without an error."""
    reference = settings(folder, tmp_path_factory.mktemp("reference") / "run")
    run_distributed(lambda: train(reference), 1, init=False, timeout_s=DEADLINE_S)
    return losses(reference.output)


@pytest.mark.core
@pytest.mark.nightly_cases("next_batch-False-2")  # covered: a batch that was drawn, and is drawn again
@pytest.mark.parametrize(
    ("callback", "after", "saved"),
    [
        *[("next_batch", False, 2), ("next_batch", True, 2), ("step", True, 3), ("after_step", False, 3)],
        ("profiler", True, 3),
    ],
)
def test_error_outside_a_step_saves_and_resume_is_bitwise_equal(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[tuple[int, float, float]],
    callback: str,
    after: bool,
    saved: int,
) -> None:
    broken = settings(folder, tmp_path / "broken")
    with monkeypatch.context() as patch:
        fail_in(patch, callback, 3, after)
        assert train_until_error(broken) == [f"step-{saved:08}"]
    run_distributed(lambda: train(broken, resume="auto"), 1, init=False, timeout_s=DEADLINE_S)
    # The row of a step whose error came before it was logged is missing.
    assert losses(broken.output) == [row for row in expected if callback != "step" or row[0] != 3]


def test_error_inside_a_step_saves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(folder, tmp_path / "run")
    fail_in(monkeypatch, "step", 3)
    assert train_until_error(config) == []


def test_error_of_one_rank_among_several_saves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may be in a collective, so no checkpoint can be saved."""
    config = settings(folder, tmp_path / "run")
    fail_in(monkeypatch, "next_batch", 3)
    assert train_until_error(config, ranks=2) == []
