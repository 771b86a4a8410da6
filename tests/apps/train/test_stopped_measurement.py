"""Signals that arrive while a model is measured between two steps."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.apps.train.callbacks import Callback, TrainerControl
from megascend.apps.train.learner import RunResult
from megascend.apps.train.objectives import TokenObjective
from megascend.apps.train.records import TrainCounts
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.testing import run_distributed
from support.task_files import write_task

DEADLINE_S = 240
BATCHES = 4
"""Batches of held-out samples in one measurement."""
TIMINGS = {"seconds", "step_seconds", "dispatch_seconds", "tokens_per_s", "peak_memory_bytes", "mfu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_imported: object) -> Path:
    """Write a model, texts to learn and to hold out, and a task of four documents."""
    folder = tmp_path_factory.mktemp("measured")
    write_checkpoint(folder / "model", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), 0)
    for name, first in (("learned", 0), ("held_out", 100)):
        lines = [json.dumps({"text": f"number {first + n}"}) + "\n" for n in range(2 * BATCHES)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    write_task(folder, [{"q": letter, "a": " 1"} for letter in "abcd"], "perplexity perplexity false")
    return folder


def settings(folder: Path, output: Path) -> RunConfig:
    values: dict[str, Any] = {
        "model": folder / "model",
        "output": output,
        "data": {"path": folder / "learned.jsonl", "global_batch_size": 2},
        "validation": {
            "path": folder / "held_out.jsonl",
            "every": 2,
            "at_start": True,
            "keep_best": True,
            "tasks": {"names": [str(folder / "small.yaml")]},
        },
        "steps": 4,
        "engine": "megatron",
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.01},
        "self_check": False,
        "plot": False,
        "timeout_s": 60,
    }
    return RunConfig(**values)


class Evaluations(Callback):
    """Keeps the lines of metrics.jsonl that a run has measured."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def on_evaluate(self, control: TrainerControl, record: Mapping[str, Any]) -> None:
        self.rows.append(without_timings(record))


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


def without_timings(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMINGS}


def lines(config: RunConfig) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    return [without_timings(row) for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> tuple[RunConfig, RunResult[TrainCounts]]:
    config = settings(folder, folder / "uninterrupted")
    return config, train_on_two_ranks(config)


@pytest.mark.parametrize(
    ("signal_at", "steps"),
    [(2, 0), (BATCHES + 2, 2), (2 * BATCHES, 2), (2 * BATCHES + 1, 4), (3 * BATCHES, 4)],
    ids=["loss at the start", "loss after step 2", "tasks after step 2", "last loss", "last tasks"],
)
def test_signal_stops_a_measurement_which_the_resumed_run_repeats(
    folder: Path, tmp_path: Path, uninterrupted: tuple[RunConfig, RunResult[TrainCounts]], signal_at: int, steps: int
) -> None:
    config = settings(folder, tmp_path / "run")
    stopped = train_on_two_ranks(config, signal_at=signal_at)
    assert (stopped.steps, stopped.stopped is not None, stopped.export) == (steps, True, None)
    if steps:
        last = lines(config)[-1]
        assert (last["step"], last["validation_loss"]) == (steps, None)
    reference, complete = uninterrupted
    evaluated: list[Mapping[str, Any]] = []
    resumed = train_on_two_ranks(config, resume="auto", evaluated=evaluated)
    assert (resumed.steps, resumed.stopped) == (4, None)
    assert lines(config) == lines(reference)
    assert evaluated == [row for row in lines(config) if row["step"] in (2, 4) and row["step"] >= steps]
    assert [row["validation_loss"] is not None for row in lines(config)] == [False, True, False, True]
    assert all("tasks/small/perplexity" in row for row in lines(config)[1::2])
    assert resumed.totals.validation_loss == complete.totals.validation_loss
    assert resumed.export is not None
    assert complete.export is not None
    weights = [(export / "model.safetensors").read_bytes() for export in (resumed.export, complete.export)]
    assert weights[0] == weights[1]
