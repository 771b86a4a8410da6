"""The process that checks a slice, its results, and where verdicts are kept."""

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

from megascend.distributed.launch import plain_environment
from megascend.errors import PlatformError
from megascend.huggingface.architectures import registered
from megascend.io import paths
from megascend.platforms import cpu_products
from megascend.selfcheck.slicing import Slice
from megascend.selfcheck.verdict import Verdict

BOUND = 2e-5
"""Largest difference, over the largest logit, that counts as agreement.

Both sides compute in fp32. Where they compute the same, the largest difference seen is 2e-6 (docs/numerics.md); a setting
that one of them ignores makes a difference of 1e-3 to 1. A slice that amplifies rounding has :data:`ROUNDINGS_APART` times
its own rounding instead."""
ROUNDINGS_APART = 4
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
        rounding: how far fp32 rounding of its parameters moves transformers' own logits, over the largest logit.
        full, default: the configuration, and its architecture's, with all defaults.
    """

    transformers_problem: str = ""
    megatron_problem: str = ""
    lengths: list[int] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    largest_logit: float = 0.0
    margin: float | None = None
    rounding: float = 0.0
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
        return not self.problem and self.largest <= self.bound

    @property
    def bound(self) -> float:
        """The largest difference, over the largest logit, that counts as agreement."""
        return max(BOUND, ROUNDINGS_APART * self.rounding)

    def verdict(self, part: Slice, layers: int) -> Verdict:
        """Return the verdict on a slice of so many layers, without the names of settings."""
        verdict = Verdict("not checked", layers=layers, lengths=list(part.lengths), not_shown=part.not_shown)
        if self.problem:
            return replace(verdict, reason=f"its slice cannot be built by {self.problem}")
        mixed_only = max(self.alone) <= self.bound and not self.agrees
        return replace(
            verdict, status="agrees" if self.agrees else "differs", largest=self.largest, mixed_only=mixed_only
        )


@dataclass(frozen=True)
class TrialReport:
    """Findings in the order of the trials, and what the worker cost."""

    findings: list[TrialResult]
    seconds: float
    peak_bytes: int


class Worker:
    """A process that imports what a check needs, and then waits for its job.

    A context manager, which ends it; it ends with this process in any case.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megascend-self-check-")
        self._path = Path(self._folder.name)
        with (self._path / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megascend.app.self_check_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
                env=plain_environment() | faster_start(),
                cwd=self._path,
                encoding="utf-8",
                errors="replace",
            )
        # A thread in the background is not asked when the process ends.
        atexit.register(self.close)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a job that it has not read
            self._process.stdin.close()
        self._folder.cleanup()

    def work(self, trials: Sequence[Trial], deadline_s: float) -> TrialReport:
        """Build and compare the models of ``trials``; once."""
        job, result = self._path / "job.json", self._path / "result.json"
        found_outside = {kind: registered(kind) for kind in (trial.config.get("model_type") for trial in trials)}
        job.write_text(
            json.dumps(
                {
                    "folder": str(self._path / "models"),
                    "result": str(result),
                    "trials": [vars(trial) for trial in trials],
                    "architectures": [vars(each) for each in found_outside.values() if each is not None],
                }
            ),
            encoding="utf-8",
        )
        try:
            self._process.communicate(f"{job}\n", timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            raise PlatformError(f"its process has taken longer than {deadline_s:.0f} s") from error
        if self._process.returncode or not result.is_file():
            end = " ".join((self._path / "errors").read_text(errors="replace", encoding="utf-8").split())[-600:]
            raise PlatformError(f"its process has ended with exit code {self._process.returncode}: {end}")
        found = json.loads(result.read_text(encoding="utf-8"))
        findings = [TrialResult(**each) for each in found["findings"]]
        return TrialReport(findings, found["seconds"], found["peak_bytes"])


def run(trials: Sequence[Trial], worker: Worker | None = None, deadline_s: float = DEADLINE_S) -> TrialReport:
    """What ``worker``, or a new one, finds out about ``trials``, on the CPU; it is ended then."""
    with worker or Worker() as at_work:
        return at_work.work(trials, deadline_s)


def faster_start() -> dict[str, str]:
    """No trial of AMX (:mod:`megascend.platforms.cpu_products`): the worker computes in fp32, which has no use for it."""
    if cpu_products.VARIABLE in os.environ or not cpu_products.shows_amx():
        return {}
    return {cpu_products.VARIABLE: cpu_products.WITHOUT_AMX}


PACKAGES = ("torch", "transformers", "megatron-core", "mcore-bridge")


def cache_folder() -> Path:
    """``self-check`` in the folder of :func:`megascend.io.paths.cache_folder`."""
    return paths.cache_folder() / "self-check"


def versions(packages: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions of ``packages``, by default of :data:`PACKAGES`."""
    return {name: metadata.version(name) for name in (PACKAGES if packages is None else packages)}
