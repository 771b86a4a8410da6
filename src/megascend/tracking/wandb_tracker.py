"""Weights & Biases. WANDB_MODE=offline keeps the run in OUTPUT/trackers/wandb, for ``wandb sync``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megascend.tracking.base import PROJECT, Outcome, TrackedRun


class Wandb:
    def __init__(self, run: TrackedRun) -> None:
        import wandb  # type: ignore[reportMissingImports]

        settings: dict[str, Any] = {"name": run.name, "dir": str(run.folder), "config": dict(run.config)}
        if "WANDB_PROJECT" not in os.environ:
            settings["project"] = PROJECT
        if run.run_id is not None:
            settings |= {"id": run.run_id, "resume": "allow"}
        # The terminal stays ours: W&B would put itself between the progress bar and it.
        settings["settings"] = wandb.Settings(console="off")
        self._run = wandb.init(**settings | dict(run.options))
        self._table = wandb.Table

    @property
    def run_id(self) -> str | None:
        return self._run.id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        rows = [[step, prompt, answer] for prompt, answer in texts.items()]
        self._run.log({"generation": self._table(columns=["step", "prompt", "answer"], data=rows)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


def open_wandb(run: TrackedRun) -> Wandb:
    return Wandb(run)
