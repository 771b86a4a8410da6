"""Signals that arrive while a model is measured between two steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train.callbacks import Callback, TrainerControl
from megascend.apps.train.learner import RunResult
from megascend.apps.train.objectives import TokenObjective
from megascend.apps.train.records import TrainCounts
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.testing import run_distributed
from support.runs import TIMINGS, exported, run_config, tiny_run, untimed, write_lines
from support.task_files import write_task

DEADLINE_S = 240
BATCHES = 4
"""Batches of held-out samples in one measurement."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_imported: object) -> Path:
    """Write a model, texts to learn and to hold out, and a task of four documents."""
    folder = tiny_run(tmp_path_factory.mktemp("measured"), (f"number {n}" for n in range(2 * BATCHES)))
    write_lines(folder / "held_out.jsonl", ({"text": f"number {100 + n}"} for n in range(2 * BATCHES)))
    write_task(folder, [{"q": letter, "a": " 1"} for letter in "abcd"], "perplexity perplexity false")
    return folder


def settings(folder: Path, output: Path) -> RunConfig:
    validation = {"path": folder / "held_out.jsonl", "every": 2, "at_start": True, "keep_best": True}
    validation["tasks"] = {"names": [str(folder / "small.yaml")]}
    return run_config(folder, output, steps=4, engine="megatron", validation=validation, export=True)


class Evaluations(Callback):
    """Keeps the lines of metrics.jsonl that a run has measured."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def on_evaluate(self, control: TrainerControl, record: Mapping[str, Any]) -> None:
        self.rows.append({key: value for key, value in record.items() if key not in TIMINGS})


def train_on_two_ranks(
    config: RunConfig, resume: str | None = None, signal_at: int = 0, evaluated: list[Mapping[str, Any]] | None = None
) -> RunResult[TrainCounts]:
    """Train; at the ``signal_at``-th batch that is measured, SIGTERM reaches rank 1 only.

    Args:
        evaluated: gets the lines that rank 0's callbacks are called with.
    """
    scored = []

    def on_rank() -> tuple[RunResult[TrainCounts], int, list[Mapping[str, Any]]]:
        losses = TokenObjective.losses

        def counting(objective: TokenObjective, *arguments: Any) -> Any:
            scored.append(objective)
            if len(scored) == signal_at and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            return losses(objective, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TokenObjective, "losses", counting)
            evaluations = Evaluations()
            return train(config, resume=resume, callbacks=[evaluations]), len(scored), evaluations.rows

    (result, count, measured), (other, _, _) = run_distributed(on_rank, 2, init=False, timeout_s=DEADLINE_S)
    assert (result.steps, result.stopped is None) == (other.steps, other.stopped is None)
    if signal_at:
        assert count == signal_at  # no batch after the one in progress
    if evaluated is not None:
        evaluated += measured
    return result


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> tuple[RunConfig, RunResult[TrainCounts]]:
    config = settings(folder, folder / "uninterrupted")
    return config, train_on_two_ranks(config)


@pytest.mark.parametrize(
    ("signal_at", "steps"),
    [(2, 0), (BATCHES + 2, 2), (3 * BATCHES, 4)],
    ids=["loss at the start", "loss after step 2", "last tasks"],
)
def test_signal_stops_a_measurement_which_the_resumed_run_repeats(
    folder: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, RunResult[TrainCounts]], signal_at: int, steps: int
) -> None:
    config = settings(folder, tmp_path / "run")
    stopped = train_on_two_ranks(config, signal_at=signal_at)
    assert (stopped.steps, stopped.stopped is not None, stopped.export) == (steps, True, None)
    if steps:
        last = untimed(config.output)[-1]
        assert (last["step"], last["validation_loss"]) == (steps, None)
    reference, complete = uninterrupted
    evaluated: list[Mapping[str, Any]] = []
    resumed = train_on_two_ranks(config, resume="auto", evaluated=evaluated)
    assert (resumed.steps, resumed.stopped) == (4, None)
    assert untimed(config.output) == untimed(reference.output)
    assert evaluated == [row for row in untimed(config.output) if row["step"] in (2, 4) and row["step"] >= steps]
    assert [row["validation_loss"] is not None for row in untimed(config.output)] == [False, True, False, True]
    assert all("tasks/small/perplexity" in row for row in untimed(config.output)[1::2])
    assert resumed.totals.validation_loss == complete.totals.validation_loss
    assert exported(config.output) == exported(reference.output)
