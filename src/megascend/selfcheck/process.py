"""Starting the worker and reading what it found."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascend.distributed.plain_process import plain_environment
from megascend.errors import PlatformError
from megascend.huggingface.architectures import registered
from megascend.platforms import cpu_products

BOUND = 2e-5
"""Largest difference, over the largest logit, that counts as agreement.

Both sides compute in fp32. Where they compute the same, the largest difference seen is 2e-6 (docs/numerics.md); a setting
that one of them ignores makes a difference of 1e-3 to 1."""
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Trial:
    """A model to build on both sides.

    Attributes:
        config: its ``config.json``.
        lengths: tokens of the samples.
        seed: of weights and samples.
    """

    config: dict[str, Any]
    lengths: Sequence[int]
    seed: int = 1


@dataclass(frozen=True)
class TrialResult:
    """What became of a trial.

    Attributes:
        transformers_problem, megatron_problem: why a side could not compute it, or empty.
        lengths: tokens of the samples, ascending.
        alone: of every sample, each in a micro batch of its own: the largest difference over the largest logit.
        together: the same with all samples in one micro batch.
        margin: the narrowest choice of experts, over the spread of the scores; None if nothing was chosen.
        full, default: the configuration, and its architecture's, with all defaults.
    """

    transformers_problem: str = ""
    megatron_problem: str = ""
    lengths: list[int] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    largest_logit: float = 0.0
    margin: float | None = None
    full: dict[str, Any] = field(default_factory=dict)
    default: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why there is nothing to compare, or empty."""
        if self.transformers_problem:
            return f"transformers: {self.transformers_problem}"
        return f"Megatron: {self.megatron_problem}" if self.megatron_problem else ""

    @property
    def largest(self) -> float:
        """The largest difference over the largest logit."""
        return max(self.alone + self.together, default=float("inf"))

    @property
    def agrees(self) -> bool:
        """Both sides have computed the same."""
        return not self.problem and self.largest <= BOUND


@dataclass(frozen=True)
class Report:
    """Findings in the order of the trials, and what the worker cost."""

    findings: list[TrialResult]
    seconds: float
    peak_bytes: int


def run(trials: Sequence[Trial], deadline_s: float = DEADLINE_S) -> Report:
    """Build and compare the models of ``trials`` in a process of its own, on the CPU.

    Raises:
        PlatformError: the process ended without a report, or took longer than ``deadline_s``.
    """
    with tempfile.TemporaryDirectory(prefix="megascend-self-check-") as name:
        folder = Path(name)
        job, result = folder / "job.json", folder / "result.json"
        found_outside = {kind: registered(kind) for kind in (trial.config.get("model_type") for trial in trials)}
        job.write_text(
            json.dumps(
                {
                    "folder": str(folder / "models"),
                    "trials": [vars(trial) for trial in trials],
                    "architectures": [vars(each) for each in found_outside.values() if each is not None],
                }
            )
        )
        worker = subprocess.Popen(
            [sys.executable, "-m", "megascend.app.self_check_worker", str(job), str(result)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environment() | faster_start(),
            cwd=folder,
        )
        with _ended_with_this_process(worker):
            try:
                _, errors = worker.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired as error:
                raise PlatformError(f"its process has taken longer than {deadline_s:.0f} s") from error
        if worker.returncode or not result.is_file():
            end = " ".join(errors.split())[-600:]
            raise PlatformError(f"its process has ended with exit code {worker.returncode}: {end}")
        found = json.loads(result.read_text())
    findings = [TrialResult(**each) for each in found["findings"]]
    return Report(findings, found["seconds"], found["peak_bytes"])


def faster_start() -> dict[str, str]:
    """No trial of AMX (:mod:`megascend.platforms.cpu_products`): the worker computes in fp32, which has no use for it."""
    if cpu_products.VARIABLE in os.environ or not cpu_products.shows_amx():
        return {}
    return {cpu_products.VARIABLE: cpu_products.WITHOUT_AMX}


@contextlib.contextmanager
def _ended_with_this_process(worker: subprocess.Popen[str]) -> Iterator[None]:
    """Kill ``worker`` when the block ends, or the process: a thread in the background is not asked when that happens."""

    def end() -> None:
        if worker.poll() is None:
            worker.kill()
            worker.wait()

    atexit.register(end)
    try:
        yield
    finally:
        atexit.unregister(end)
        end()
