"""The worker process that checks a slice, its results, and the cache folder of verdicts."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from megascend.errors import PlatformError
from megascend.models import registered
from megascend.models.registry import to_reference
from megascend.models.selfcheck.slicing import Slice
from megascend.models.selfcheck.verdict import Verdict
from megascend.runtime.distributed.launch import plain_environment
from megascend.runtime.io import paths
from megascend.runtime.io.hashing import cache_key
from megascend.runtime.platforms import cpu_products

BOUND = 2e-5
"""Largest difference, over the largest logit, that counts as agreement.

Both sides compute in fp32. For equivalent computations the largest observed difference is 2e-6 (benchmarks/numerics.md);
a setting that one side ignores causes one of 1e-3 to 1. For a slice that amplifies rounding the bound is :data:`ROUNDINGS_APART`
times the effect of rounding on it."""
ROUNDINGS_APART = 4
DEADLINE_S = 300.0
"""Seconds that a worker may take for all its trials."""


@dataclass(frozen=True)
class Trial:
    """A model to build on both sides.

    Attributes:
        config: its ``config.json``.
        lengths: tokens of the samples.
        seed: seed of weights and samples.
    """

    config: dict[str, Any]
    lengths: Sequence[int]
    seed: int = 1


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        transformers_problem, megatron_problem: why a side could not compute the model, or empty.
        lengths: tokens of the samples, ascending.
        separate: largest difference of every sample over the largest logit, with one sample a micro batch.
        batched: the same with all samples in one micro batch.
        margin: the narrowest margin of an expert choice, over the spread of the scores; None without experts.
        rounding: change of transformers' logits by fp32 rounding of the parameters, over the largest logit.
        unreached: description of limits that no values have reached, or empty.
        full, default: the model's configuration and its architecture's default one, with all settings.
    """

    transformers_problem: str = ""
    megatron_problem: str = ""
    lengths: list[int] = field(default_factory=list)
    separate: list[float] = field(default_factory=list)
    batched: list[float] = field(default_factory=list)
    largest_logit: float = 0.0
    margin: float | None = None
    rounding: float = 0.0
    unreached: str = ""
    full: dict[str, Any] = field(default_factory=dict)
    default: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Return why a side could not compute the model, or empty."""
        if self.transformers_problem:
            return f"transformers: {self.transformers_problem}"
        return f"Megatron: {self.megatron_problem}" if self.megatron_problem else ""

    @property
    def largest(self) -> float:
        """Return the largest difference over the largest logit."""
        return max(self.separate + self.batched, default=float("inf"))

    @property
    def agrees(self) -> bool:
        """Check whether both sides computed the same."""
        return not self.problem and self.largest <= self.bound

    @classmethod
    def worst(cls, results: Sequence[TrialResult]) -> TrialResult:
        """Return the result that is farthest from agreement, each by its own bound."""
        return max(results, key=lambda result: float("inf") if result.problem else result.largest / result.bound)

    @property
    def bound(self) -> float:
        """Return the largest difference, over the largest logit, that counts as agreement."""
        return max(BOUND, ROUNDINGS_APART * self.rounding)

    def verdict(self, part: Slice, layers: int) -> Verdict:
        """Return the verdict on a slice of ``layers`` layers, without the settings that cause a difference."""
        not_shown = "; ".join(filter(None, [part.not_shown, self.unreached]))
        verdict = Verdict("not checked", layers=layers, lengths=list(part.lengths), not_shown=not_shown)
        if self.problem:
            return replace(verdict, reason=f"its slice cannot be built by {self.problem}")
        mixed_only = max(self.separate) <= self.bound and not self.agrees
        return replace(
            verdict, status="agrees" if self.agrees else "differs", largest=self.largest, mixed_only=mixed_only
        )


@dataclass(frozen=True)
class TrialReport:
    """Results in the order of the trials, and the worker's time and peak memory."""

    findings: list[TrialResult]
    seconds: float
    peak_bytes: int


class Worker:
    """A process that imports the packages of a check and then waits for its job.

    A context manager that ends the process; it ends with this process in any case.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megascend-self-check-")
        self._path = Path(self._folder.name)
        # A file, not a pipe: it is read only after the worker has ended, and a full pipe would block the worker.
        with (self._path / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megascend.apps.train.self_check_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
                # A plain environment: the worker is not a rank, and imports Megatron for the CPU.
                env=plain_environment() | faster_start(),
                cwd=self._path,
                encoding="utf-8",
                errors="replace",
            )
        # A background thread that holds the worker does not run its cleanup when the interpreter exits.
        atexit.register(self.close)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process, if it runs, and remove its folder."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # closing flushes a job that the process has not read
            self._process.stdin.close()
        self._folder.cleanup()

    def work(self, trials: Sequence[Trial], deadline_s: float) -> TrialReport:
        """Build and compare the models of ``trials``. A worker runs one job only."""
        job, result = self._path / "job.json", self._path / "result.json"
        model_types = {trial.config.get("model_type"): None for trial in trials}
        # Architectures that this process registered are unknown to the worker, which is another process.
        architectures = [registered(model_type) for model_type in model_types]
        # Job and result are files; stdin carries the path of the job only.
        job.write_text(
            json.dumps(
                {
                    "folder": str(self._path / "models"),
                    "result": str(result),
                    "trials": [vars(trial) for trial in trials],
                    "architectures": [
                        to_reference(architecture) for architecture in architectures if architecture is not None
                    ],
                }
            ),
            encoding="utf-8",
        )
        try:
            # A line on stdin starts the job; until then the worker imports. At the end of stdin without a job it exits.
            self._process.communicate(f"{job}\n", timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            raise PlatformError(f"its process took longer than {deadline_s:.0f} s") from error
        if self._process.returncode or not result.is_file():
            end = " ".join((self._path / "errors").read_text(errors="replace", encoding="utf-8").split())[-600:]
            raise PlatformError(f"its process ended with exit code {self._process.returncode}: {end}")
        report = json.loads(result.read_text(encoding="utf-8"))
        findings = [TrialResult(**values) for values in report["findings"]]
        return TrialReport(findings, report["seconds"], report["peak_bytes"])


def run(trials: Sequence[Trial], worker: Worker | None = None, deadline_s: float = DEADLINE_S) -> TrialReport:
    """Run ``trials`` on the CPU in ``worker``, or in a new one, and end the worker."""
    with worker or Worker() as active:
        return active.work(trials, deadline_s)


def faster_start() -> dict[str, str]:
    """Return environment variables that skip the AMX trial: the worker computes in fp32, which does not use AMX."""
    if cpu_products.VARIABLE in os.environ or not cpu_products.shows_amx():
        return {}
    return {cpu_products.VARIABLE: cpu_products.WITHOUT_AMX}


def start_worker(model_dir: Path, max_length: int | None) -> Worker | None:
    """Start a worker before the check, while this process still imports Megatron; both take seconds.

    Only that import shows for certain whether a run has to check its model. So the first check of a model and settings leaves a
    marker file (:func:`mark_checked`). Return None if it exists, or if the model has a sliding window, because only its Megatron
    configuration shows whether that is active. Also return None if the model cannot be read or a package is missing, which is
    reported where the model or package is needed.

    Args:
        max_length: ``batching.max_length``.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, metadata.PackageNotFoundError):
        raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        if raw.get("sliding_window") is None and not _marker(model_dir, max_length).exists():
            return Worker()
    return None


def mark_checked(model_dir: Path, max_length: int | None) -> None:
    """Leave the marker by which later runs do not start a worker."""
    with contextlib.suppress(OSError):
        _marker(model_dir, max_length).touch()


def _marker(model_dir: Path, max_length: int | None) -> Path:
    content = [(model_dir / "config.json").read_text(encoding="utf-8"), max_length, versions()]
    return cache_folder() / f"{cache_key(content)}.asked"


PACKAGES = ("torch", "transformers", "megatron-core", "mcore-bridge")


def cache_folder() -> Path:
    """Return the folder ``self-check`` in :func:`megascend.runtime.io.paths.cache_folder`."""
    return paths.cache_folder() / "self-check"


def versions(packages: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions of ``packages``, by default of :data:`PACKAGES`."""
    return {name: metadata.version(name) for name in (PACKAGES if packages is None else packages)}
