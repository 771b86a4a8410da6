"""MLflow, through its client: nothing of the process is changed. MLFLOW_TRACKING_URI says where runs go."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from megascend.tracking.base import PROJECT, Outcome, TrackedRun, flattened

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
PARAMETERS = 100
"""That one call of MLflow's takes."""


class Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient  # type: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # type: ignore[reportMissingImports]

        options: dict[str, Any] = {"experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)} | dict(run.options)
        experiment = options.pop("experiment")
        self._client, self._metric = MlflowClient(**options), Metric
        if run.run_id is not None:
            self.run_id: str | None = run.run_id
            self._client.update_run(run.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.run_id = self._client.create_run(number, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)) for key, value in flattened(run.config).items()]
        for start in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self.run_id, params=parameters[start : start + PARAMETERS])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [self._metric(key, value, now, step) for key, value in figures.items()])

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        shown = "\n\n".join(f"> {prompt}\n{answer}" for prompt, answer in texts.items())
        self._client.log_text(self.run_id, shown, f"generation/step-{step}.txt")

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self.run_id, STATES[outcome])


def open_mlflow(run: TrackedRun) -> Mlflow:
    return Mlflow(run)
