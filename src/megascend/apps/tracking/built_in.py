"""Built-in trackers: each wraps one package, imported when a run is opened.

- TensorBoard: event files in OUTPUT/tensorboard. A resumed run drops the steps after its checkpoint.
- Weights & Biases: ``WANDB_MODE=offline`` keeps the run in OUTPUT/trackers/wandb, for ``wandb sync``.
- SwanLab: ``SWANLAB_MODE=offline`` keeps the run in OUTPUT/trackers/swanlab, for ``swanlab sync``.
- Trackio: without a Space or a server it keeps runs in a database on this machine (TRACKIO_DIR), for ``trackio show``.
- MLflow: through its client, which changes no global state. MLFLOW_TRACKING_URI selects the server.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megascend.apps.tracking.tracker import RunOutcome, TrackedRun, figures_line

PROJECT = "megascend"
"""Default project, for trackers with projects."""
SWANLAB_STATES = {"finished": "success", "stopped": "aborted", "failed": "crashed"}
MLFLOW_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MLFLOW_BATCH = 100
"""Maximum parameters per MLflow call."""


class TensorBoard:
    run_id = None  # the files are the run

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        settings: dict[str, Any] = {"log_dir": str(run.folder.parent / "tensorboard")}
        if run.resumed_after:
            # Steps that were logged after the checkpoint are computed again, and would appear twice.
            settings["purge_step"] = run.resumed_after + 1
        self._writer = SummaryWriter(**settings | dict(run.options))
        # The text would otherwise be added once for each resume.
        if not run.resumed_after:
            self._writer.add_text("config", code_block(json.dumps(run.config, indent=2)))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for number, (prompt, answer) in enumerate(texts.items()):
            self._writer.add_text(f"generation/{number}", f"{code_block(prompt)}\n\n{code_block(answer)}", step)
        self._writer.flush()

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("rollouts", rollouts_markdown(rows), step)
        self._writer.flush()

    def close(self, outcome: RunOutcome) -> None:
        self._writer.close()


def rollouts_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rollouts as Markdown: not as a table, whose cells cannot hold lines of text."""
    return "\n\n".join(
        f"**{figures_line(row)}**\n\n{code_block(row['prompt'])}\n\nresponse:\n\n{code_block(row['response'])}"
        for row in rows
    )


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns; None where a row lacks an entry."""
    # The texts last: a part of the reward may be in later rows only.
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "response"))
    return {name: [row.get(name) for row in rows] for name in [*names, "prompt", "response"]}


def code_block(text: str) -> str:
    """Indent ``text`` as a code block of Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class _LikeWandb:
    """Trackers whose packages have the interface of Weights & Biases."""

    _run: Any

    @property
    def run_id(self) -> str | None:
        return self._run.id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)


class Wandb(_LikeWandb):
    def __init__(self, run: TrackedRun) -> None:
        import wandb  # type: ignore[reportMissingImports]

        settings: dict[str, Any] = {"name": run.name, "dir": str(run.folder), "config": dict(run.config)}
        # An argument would override the variable.
        if "WANDB_PROJECT" not in os.environ:
            settings["project"] = PROJECT
        if run.run_id is not None:
            # "allow": a run that was deleted on the server is created again, instead of failing.
            settings |= {"id": run.run_id, "resume": "allow"}
        # W&B would wrap the terminal and garble the progress bar.
        settings["settings"] = wandb.Settings(console="off")
        self._run = wandb.init(**settings | dict(run.options))
        self._table = wandb.Table

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        rows = [[step, prompt, answer] for prompt, answer in texts.items()]
        self._run.log({"generation": self._table(columns=["step", "prompt", "answer"], data=rows)}, step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = columns(rows)
        data = [list(row) for row in zip(*table.values(), strict=True)]
        self._run.log({"rollouts": self._table(columns=list(table), data=data)}, step=step)

    def close(self, outcome: RunOutcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


class SwanLab(_LikeWandb):
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
        # SwanLab would wrap the terminal, garble the progress bar, and prompt for a key.
        settings["settings"] = swanlab.Settings(terminal={"proxy_type": "none"}, interactive=False)
        self._run = swanlab.init(**settings | dict(run.options))
        self._text = swanlab.Text

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        items = [self._text(answer, caption=prompt) for prompt, answer in texts.items()]
        self._run.log({"generation": items}, step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        items = [self._text(row["response"], caption=f"{figures_line(row)}\n{row['prompt']}") for row in rows]
        self._run.log({"rollouts": items}, step=step)

    def close(self, outcome: RunOutcome) -> None:
        self._run.finish(state=SWANLAB_STATES[outcome])


class Trackio(_LikeWandb):
    def __init__(self, run: TrackedRun) -> None:
        import trackio  # type: ignore[reportMissingImports]

        settings: dict[str, Any] = {"project": PROJECT, "name": run.run_id or run.name, "config": dict(run.config)}
        settings["resume"] = "allow" if run.run_id is not None else "never"
        self._run = trackio.init(**settings | {"embed": False} | dict(run.options))
        self._markdown = trackio.Markdown

    @property
    def run_id(self) -> str | None:
        return self._run.name  # Trackio resumes runs by name

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        markdown = "\n\n".join(f"**{prompt}**\n\n{answer}" for prompt, answer in texts.items())
        self._run.log({"generation": self._markdown(markdown)}, step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._run.log({"rollouts": self._markdown(rollouts_markdown(rows))}, step=step)

    def close(self, outcome: RunOutcome) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient  # type: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # type: ignore[reportMissingImports]

        options: dict[str, Any] = {"experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)} | dict(run.options)
        name = options.pop("experiment")
        # The client, not mlflow.start_run(), which sets a global active run that the user's own code may use.
        self._client, self._metric = MlflowClient(**options), Metric
        if run.run_id is not None:
            self.run_id: str | None = run.run_id
            # A stopped run was marked KILLED or FAILED.
            self._client.update_run(run.run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.run_id = self._client.create_run(number, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)) for key, value in flattened(run.config).items()]
        # The server refuses larger batches.
        for start in range(0, len(parameters), MLFLOW_BATCH):
            self._client.log_batch(self.run_id, params=parameters[start : start + MLFLOW_BATCH])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # MLflow takes milliseconds.
        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [self._metric(key, value, now, step) for key, value in figures.items()])

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        text = "\n\n".join(f"> {prompt}\n{answer}" for prompt, answer in texts.items())
        self._client.log_text(self.run_id, text, f"generation/step-{step}.txt")

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self.run_id is not None
        # One file a step: MLflow's log_table appends to one file, which it would download and send again each time.
        self._client.log_table(self.run_id, columns(rows), f"rollouts/step-{step}.json")

    def close(self, outcome: RunOutcome) -> None:
        self._client.set_terminated(self.run_id, MLFLOW_STATES[outcome])


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys; an empty section stays as the value ``{}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
