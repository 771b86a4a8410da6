"""A short run for tests of job files, with processes in one group that ends with the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

DEADLINE_S = 300.0
STEPS = 30


def write_run(folder: Path, **settings: Any) -> None:
    """Write ``run.yaml`` and data of a run on the CPU in ``folder``."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(4)))
    values = {
        "model": "model",
        "output": "runs/job",
        "data": {"path": "texts.jsonl", "global_batch_size": 2},
        "steps": STEPS,
        "platform": "cpu",
        "precision": "fp32",
        "plot": False,
        "timeout_s": 60,
        "checkpoint": {"every": 10},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values | settings))


def steps_of(run: Path) -> list[int]:
    """Return the steps in a run's metrics, in their order."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def events_of(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def started(command: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """Start a command in its own process group, with its output in ``folder / log``; kill the group at the end of the block."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder, env=dict(variables), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for_step(step: int, folder: Path, *processes: subprocess.Popen) -> None:
    """Wait until the run in ``folder`` has logged a step; fail if a process ends before, or at the deadline."""
    until = time.monotonic() + DEADLINE_S
    while step not in steps_of(folder / "runs" / "job"):
        ended = [process.returncode for process in processes if process.poll() is not None]
        assert not ended, (ended, (folder / "log").read_text()[-4000:])
        assert time.monotonic() < until, (folder / "log").read_text()[-4000:]
        time.sleep(0.05)
