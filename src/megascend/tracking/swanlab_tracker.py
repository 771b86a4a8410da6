"""SwanLab. SWANLAB_MODE=offline keeps the run in OUTPUT/trackers/swanlab, for ``swanlab sync``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megascend.tracking.base import PROJECT, Outcome, TrackedRun

STATES = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class SwanLab:
    def __init__(self, run: TrackedRun) -> None:
        import swanlab  # type: ignore[reportMissingImports]

        settings: dict[str, Any] = {
            "name": run.name,
            "log_dir": str(run.folder / "swanlab"),
            "config": dict(run.config),
        }
        if "SWANLAB_PROJECT" not in os.environ and "SWANLAB_PROJ_NAME" not in os.environ:
            settings["project"] = PROJECT
        if run.run_id is not None:
            settings |= {"id": run.run_id, "resume": "allow"}
        # The terminal stays ours: SwanLab would put itself between the progress bar and it, and ask for a key there.
        settings["settings"] = swanlab.Settings(terminal={"proxy_type": "none"}, interactive=False)
        self._run = swanlab.init(**settings | dict(run.options))
        self._text = swanlab.Text

    @property
    def run_id(self) -> str | None:
        return self._run.id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        shown = [self._text(answer, caption=prompt) for prompt, answer in texts.items()]
        self._run.log({"generation": shown}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(state=STATES[outcome])


def open_swanlab(run: TrackedRun) -> SwanLab:
    return SwanLab(run)
