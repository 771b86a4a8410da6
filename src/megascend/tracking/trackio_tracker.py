"""Trackio. Without a Space or a server it keeps runs in a database on this machine (TRACKIO_DIR), for ``trackio show``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascend.tracking.base import PROJECT, Outcome, TrackedRun


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio  # type: ignore[reportMissingImports]

        settings: dict[str, Any] = {"project": PROJECT, "name": run.run_id or run.name, "config": dict(run.config)}
        settings["resume"] = "allow" if run.run_id is not None else "never"
        self._run = trackio.init(**settings | {"embed": False} | dict(run.options))
        self._markdown = trackio.Markdown

    @property
    def run_id(self) -> str | None:
        return self._run.name  # by which Trackio resumes a run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        shown = "\n\n".join(f"**{prompt}**\n\n{answer}" for prompt, answer in texts.items())
        self._run.log({"generation": self._markdown(shown)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


def open_trackio(run: TrackedRun) -> Trackio:
    return Trackio(run)
