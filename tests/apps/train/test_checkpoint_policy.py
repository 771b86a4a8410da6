"""The schedule of checkpoints, and checkpoints without a part that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megascend.apps.train.checkpoint_policy import CheckpointPolicy
from megascend.config import RunConfig
from megascend.errors import CheckpointError


class Backend:
    """Backend that saves an empty checkpoint directory, and fails to export unless ``exportable``."""

    rank, step_count = 0, 0

    def __init__(self, exportable: bool = True) -> None:
        self._exportable = exportable

    def any_rank(self, *values: bool) -> tuple[bool, ...]:
        return values

    def from_rank_0(self, produce: Any) -> Any:
        return produce()

    def prepare_saves(self) -> None:
        pass

    def save(self, path: Path, *, hf: bool, after: Any, **contents: Any) -> Any:
        if hf and not self._exportable:
            raise CheckpointError("model.norm.weight: 70000 is beyond fp16's range")
        path.mkdir(parents=True)
        after(path)
        return SimpleNamespace(path=path, done=True, wait=lambda: None, outcome=lambda: None)


def policy(tmp_path: Path, backend: Any, **checkpoint: Any) -> tuple[CheckpointPolicy, list[str], SimpleNamespace]:
    """Return the policy of a run, its events, and its directory."""
    config = RunConfig.model_validate(
        {
            "model": tmp_path,
            "output": tmp_path / "run",
            "data": {"path": tmp_path / "d.jsonl"},
            "checkpoint": checkpoint,
        }
    )
    events: list[str] = []
    log: Any = SimpleNamespace(event=lambda name, **fields: events.append(f"{name} {json.dumps(fields, default=str)}"))
    directory = SimpleNamespace(
        config=config, backend=backend, event_log=log, take_over=lambda: None, holds_earlier_run=False
    )
    learner: Any = SimpleNamespace(state=dict, best_step=None)
    return CheckpointPolicy(cast("Any", directory), learner, {}), events, directory


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_export_does_not_prevent_the_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    backend = Backend(exportable=False)
    saves, events, _ = policy(tmp_path, backend, every=2, hf=True, asynchronous=asynchronous, on_failure="stop")
    saves.after_step(2, False)
    saves.finish(2)
    assert saves.problem is None
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert [event.split()[0] for event in events] == ["hf_failed", "saved", "save"]


def test_no_checkpoint_until_ready(tmp_path: Path) -> None:
    saves, _, directory = policy(tmp_path, Backend(), every=1)
    directory.holds_earlier_run = True
    assert saves.after_step(1, False) is False
    assert saves.after_step(2, True) is True
    saves.finish(2)
    assert not (tmp_path / "run").exists()
    directory.holds_earlier_run = False
    saves.after_step(3, False)
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.parametrize("saved", [True, False])
def test_stop_before_a_step_saves_what_was_resumed_from_elsewhere(tmp_path: Path, saved: bool) -> None:
    backend = Backend()
    backend.step_count = 5
    path = tmp_path / "run" / "checkpoints" / "step-00000005"
    if saved:
        path.mkdir(parents=True)
    saves, events, _ = policy(tmp_path, backend)
    saves.after_step(5, True)
    saves.finish(5)
    assert path.is_dir()
    assert [event.split()[0] for event in events] == ([] if saved else ["saved", "save"])
