"""Callbacks of the caller in ``megascend rl``, on two ranks: records, a stop, and the resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import megascend
from megascend.apps.train.callbacks import TrainerControl
from megascend.apps.train.learner import RunResult
from megascend.testing import run_distributed
from support.rl_runs import DEADLINE_S, rows, run, settings

pytestmark = pytest.mark.usefixtures("megatron_imported")


class Lines(megascend.Callback):
    """Keeps its calls, and asks to stop after a step."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.calls: list[tuple[str, Any]] = []

    def on_step(self, control: TrainerControl, record: Mapping[str, Any]) -> None:
        self.calls.append(("on_step", record))
        control.should_training_stop = control.step == self.last_step

    def on_evaluate(self, control: TrainerControl, record: Mapping[str, Any]) -> None:
        self.calls.append(("on_evaluate", record))

    def on_end(self, control: TrainerControl, result: RunResult[Any]) -> None:
        self.calls.append(("on_end", result.stopped))


def test_callbacks_are_called_on_rank_0_and_stop_all_ranks(folder: Path) -> None:
    evaluation = {"prompts": folder / "prompts.jsonl", "every": 2}
    changes: dict[str, Any] = {"steps": 4, "parallel": {"tensor": 2}, "rollout": {"max_lag": 0}}
    config = settings(folder, "callbacks", evaluation=evaluation, **changes)

    def on_rank(last_step: int, resume: str | None) -> tuple[RunResult[Any], list[tuple[str, Any]]]:
        lines = Lines(last_step)
        return run(config, resume=resume, callbacks=[lines]), lines.calls

    (first, calls), (second, others) = run_distributed(on_rank, 2, 3, None, init=False, timeout_s=DEADLINE_S)
    assert first.stopped == second.stopped == "callback Lines"
    assert (first.steps, others) == (3, [])
    one, two, three = rows(config)
    assert two["eval_reward"] is not None
    steps = [("on_step", one), ("on_step", two), ("on_evaluate", two), ("on_step", three)]
    assert calls == [*steps, ("on_end", "callback Lines")]
    (first, calls), _ = run_distributed(on_rank, 2, 0, "auto", init=False, timeout_s=DEADLINE_S)
    assert (first.stopped, first.steps) == (None, 4)
    last = rows(config)[3]
    assert calls == [("on_step", last), ("on_evaluate", last), ("on_end", None)]
