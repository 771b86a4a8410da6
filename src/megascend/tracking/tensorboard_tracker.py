"""TensorBoard: event files in OUTPUT/tensorboard. A resumed run drops the steps after its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megascend.tracking.base import Outcome, TrackedRun


class TensorBoard:
    run_id = None  # the files are the run

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        settings: dict[str, Any] = {"log_dir": str(run.folder.parent / "tensorboard")}
        if run.resumed_after:
            settings["purge_step"] = run.resumed_after + 1
        self._writer = SummaryWriter(**settings | dict(run.options))
        if not run.resumed_after:
            self._writer.add_text("config", as_block(json.dumps(run.config, indent=2)))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for number, (prompt, answer) in enumerate(texts.items()):
            self._writer.add_text(f"generation/{number}", f"{as_block(prompt)}\n\n{as_block(answer)}", step)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


def as_block(text: str) -> str:
    """As Markdown that shows ``text`` as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def open_tensorboard(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run)
