"""Sixteen client processes at random pace: each ends as in a separate run, and their steps share batches."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from serve_ranks import KEYS, service

from megascend.apps.serve.checkpoints import CheckpointPath
from megascend.config import Parallel
from megascend.config.serve import Limits, ServeConfig
from megascend.testing import write_tiny_checkpoint
from support.forked_programs import environment

pytestmark = pytest.mark.nightly
FOLDER = Path(__file__).parent
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 60, 64)
STEPS = 15
PAUSE_S = 0.3
"""The longest pause before a step: a few units of work, so that it is never the same tenants that share a batch."""
DEADLINE_S = 900.0
"""Of each of the sixteen clients, which take the machine from one another."""
LAYOUTS = {"TP2": Parallel(tensor=2), "DP2": Parallel()}


class Served:
    """A service on two ranks, and what each tenant is answered when it is alone."""

    def __init__(self, url: str, settings: ServeConfig, folder: Path) -> None:
        self.url, self.settings, self.folder = url, settings, folder
        self.jobs = [self._job(number, rank) for number, rank in enumerate(RANKS)]
        completed = subprocess.run(
            self._command(self.jobs, "alone"), env=environment(), timeout=DEADLINE_S, check=False
        )
        assert completed.returncode == 0
        self.references = self._answers("alone")

    def _job(self, number: int, rank: int) -> dict[str, Any]:
        policy = number % 4 == 3
        return {
            "url": self.url, "key": KEYS[self.tenant(number)], "model": str(self.settings.model), "vocabulary": 320,
            "rank": rank, "seed": number, "learning_rate": 1e-4 if policy else 1e-3 * (1 + number % 4), "pause_s": 0.0,
            "steps": STEPS, "loss": "importance_sampling" if policy else "cross_entropy",
        }  # fmt: skip

    @staticmethod
    def tenant(number: int) -> str:
        return tuple(KEYS)[number % 2]

    def _command(self, jobs: Sequence[dict[str, Any]], name: str, *extra: Path) -> list[Any]:
        (self.folder / f"{name}.jobs").write_text(json.dumps(jobs))
        program = FOLDER / "tenant_program.py"
        return [sys.executable, program, self.folder / f"{name}.jobs", self.folder / f"{name}.json", *extra]

    def _answers(self, name: str) -> list[dict[str, Any]]:
        return json.loads((self.folder / f"{name}.json").read_text())

    @contextlib.contextmanager
    def all_together(self, name: str) -> Iterator[tuple[list[str], Callable[[], None]]]:
        """Start all tenants: their models' names once all are there, and what lets them begin. They end with the block."""
        go = self.folder / f"{name}-go"
        ready = [self.folder / f"{name}-{number}.ready" for number in range(len(self.jobs))]
        programs = [
            subprocess.Popen(
                self._command([{**job, "pause_s": PAUSE_S}], f"{name}-{number}", ready[number], go), env=environment()
            )
            for number, job in enumerate(self.jobs)
        ]
        try:
            end = time.monotonic() + DEADLINE_S
            while not all(file.exists() and file.read_text() for file in ready):
                assert all(program.poll() is None for program in programs)
                assert time.monotonic() < end
                time.sleep(0.05)
            yield [file.read_text() for file in ready], go.touch
            assert [program.wait(DEADLINE_S) for program in programs] == [0] * len(programs)
        finally:
            for program in programs:
                program.kill()
                program.wait()

    def check_trajectories(self, name: str) -> None:
        """Compare losses with separate runs to 1e-6 of the summed terms' sizes, and adapters to 1e-5.

        Importance sampling has the exponential of log-probabilities, whose last bit is worth 5e-7 or 1e-6: within 5e-6.
        """
        loss_differences, parameter_difference = {"cross_entropy": 0.0, "importance_sampling": 0.0}, 0.0
        for number, reference in enumerate(self.references):
            (answer,) = self._answers(f"{name}-{number}")
            assert len(answer["losses"]) == STEPS
            for (loss, _), (expected, size) in zip(answer["losses"], reference["losses"], strict=True):
                kind = self.jobs[number]["loss"]
                loss_differences[kind] = max(loss_differences[kind], abs(loss - expected) / size)
            adapter, reference_adapter = self._adapter(number, answer["path"]), self._adapter(number, reference["path"])
            assert adapter.keys() == reference_adapter.keys()
            parameter_difference = max(
                parameter_difference, *(float((adapter[key] - reference_adapter[key]).abs().max()) for key in adapter)
            )
        print(f"{name}: losses differ by {loss_differences}, adapters by {parameter_difference:.1e}")
        assert loss_differences["cross_entropy"] <= 1e-6
        assert loss_differences["importance_sampling"] <= 5e-6
        assert parameter_difference <= 1e-5

    def _adapter(self, number: int, path: str) -> dict[str, Any]:
        directory = CheckpointPath.parse(path).directory(self.settings.storage, self.tenant(number))
        return load_file(directory / "adapter_model.safetensors")

    def figures(self) -> dict[str, float]:
        """Return the server's metrics by name and labels."""
        lines = re.findall(r"^(megascend_\S+) (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in lines}


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tenants")
    model = write_tiny_checkpoint(folder / "qwen3", "qwen3", num_hidden_layers=2)
    settings = ServeConfig(
        model=model, port=0, storage=folder / "storage", precision="fp32", parallel=LAYOUTS[request.param], platform="cpu",
        max_models=100, limits=Limits(models=50),
    )  # fmt: skip
    with service(settings, 2, folder / "run", 4 * DEADLINE_S) as url:
        yield Served(url, settings, folder)


class Counted:
    """Increase of the server's metrics since construction."""

    def __init__(self, served: Served) -> None:
        self._served, self._before = served, served.figures()

    def more(self) -> dict[str, float]:
        return {name: value - self._before.get(name, 0.0) for name, value in self._served.figures().items()}


def check_shared(more: dict[str, float], least: float) -> None:
    """Check that at least this part of the steps ran in batches of several tenants."""
    steps, single = more["megascend_models_in_batch_count"], more['megascend_models_in_batch_bucket{le="1.0"}']
    print(f"{steps:.0f} steps, {1 - single / steps:.0%} of them in batches of several tenants")
    assert single <= (1 - least) * steps


def waits(more: dict[str, float]) -> dict[str, float]:
    """Return the parts of the steps that waited for so many units of work or fewer, and the average seconds."""
    steps = more["megascend_units_waited_count"]
    quantiles = {
        bound: round(more[f'megascend_units_waited_bucket{{le="{bound:.1f}"}}'] / steps, 3)
        for bound in (0, 1, 2, 3, 4, 8, 16)
    }
    print(f"waited: {quantiles} of {steps:.0f}; {more['megascend_wait_seconds_sum'] / steps:.3f} s on average")
    return quantiles


def test_sixteen_tenants_sharing_batches_train_as_in_separate_runs(served) -> None:
    counts = Counted(served)
    with served.all_together("together") as (_, go):
        go()
    extra = counts.more()
    served.check_trajectories("together")
    assert extra["megascend_models_in_batch_count"] == STEPS * len(RANKS)
    check_shared(extra, 0.8)
    waits(extra)
