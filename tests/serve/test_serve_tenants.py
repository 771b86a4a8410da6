"""Sixteen client processes at random pace: each ends where it ends alone, and their steps share batches."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from serve_ranks import KEYS, service

from forked_programs import environment
from megascend.config import Parallel
from megascend.config.serve import ServeConfig
from megascend.serve.names import CheckpointPath
from megascend.testing import write_tiny_checkpoint

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 60, 64)
STEPS = 15
PAUSE_S = 0.1
"""The longest pause before a step: about as long as a step takes, so that the server has something to do all the time."""
DEADLINE_S = 200.0
LAYOUTS = {"TP2": Parallel(tensor=2), "DP2": Parallel()}


class Served:
    """A service on two ranks, and what each tenant is answered when it is alone."""

    def __init__(self, url: str, settings: ServeConfig, folder: Path) -> None:
        self.url, self.settings, self.folder = url, settings, folder
        self.jobs = [self._job(number, rank) for number, rank in enumerate(RANKS)]
        done = subprocess.run(self._command(self.jobs, "alone"), env=environment(), timeout=DEADLINE_S, check=False)
        assert done.returncode == 0
        self.alone = self._answers("alone")

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

    def _command(self, jobs: Sequence[dict[str, Any]], name: str, *more: Path) -> list[Any]:
        (self.folder / f"{name}.jobs").write_text(json.dumps(jobs))
        program = HERE / "tenant_program.py"
        return [sys.executable, program, self.folder / f"{name}.jobs", self.folder / f"{name}.json", *more]

    def _answers(self, name: str) -> list[dict[str, Any]]:
        return json.loads((self.folder / f"{name}.json").read_text())

    @contextlib.contextmanager
    def all_together(self, name: str) -> Iterator[list[str]]:
        """Start all tenants; their models' names once all are there, and they begin. At the end of the block they have ended."""
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
            go.touch()
            yield [file.read_text() for file in ready]
            assert [program.wait(DEADLINE_S) for program in programs] == [0] * len(programs)
        finally:
            for program in programs:
                program.kill()
                program.wait()

    def check_trajectories(self, name: str) -> None:
        """Losses within 1e-6 of those alone, in terms of what is summed up; adapters within 1e-5.

        Importance sampling has the exponential of log-probabilities, whose last bit is worth 5e-7 or 1e-6: within 5e-6.
        """
        worst, furthest = {"cross_entropy": 0.0, "importance_sampling": 0.0}, 0.0
        for number, alone in enumerate(self.alone):
            (found,) = self._answers(f"{name}-{number}")
            assert len(found["losses"]) == STEPS
            for (loss, _), (expected, size) in zip(found["losses"], alone["losses"], strict=True):
                kind = self.jobs[number]["loss"]
                worst[kind] = max(worst[kind], abs(loss - expected) / size)
            mine, theirs = self._adapter(number, found["path"]), self._adapter(number, alone["path"])
            assert mine.keys() == theirs.keys()
            furthest = max(furthest, *(float((mine[key] - theirs[key]).abs().max()) for key in mine))
        print(f"{name}: losses differ by {worst}, adapters by {furthest:.1e}")
        assert worst["cross_entropy"] <= 1e-6
        assert worst["importance_sampling"] <= 5e-6
        assert furthest <= 1e-5

    def _adapter(self, number: int, path: str) -> dict[str, Any]:
        directory = CheckpointPath.parse(path).directory(self.settings.storage, self.tenant(number))
        return load_file(directory / "adapter_model.safetensors")

    def figures(self) -> dict[str, float]:
        """What the server counts, by name and labels."""
        lines = re.findall(r"^(megascend_\S+) (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in lines}


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tenants")
    model = write_tiny_checkpoint(folder / "qwen3", "qwen3", num_hidden_layers=2)
    settings = ServeConfig(
        model=model, port=0, storage=folder / "storage", precision="fp32", parallel=LAYOUTS[request.param], platform="cpu"
    )  # fmt: skip
    with service(settings, 2, folder / "run") as url:
        yield Served(url, settings, folder)


def test_sixteen_tenants_train_as_each_alone_and_share_batches(served) -> None:
    before = served.figures()
    with served.all_together("together"):
        pass
    after = served.figures()
    served.check_trajectories("together")

    def more(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    steps, alone = more("megascend_models_in_batch_count"), more('megascend_models_in_batch_bucket{le="1"}')
    print(f"{steps:.0f} steps, {1 - alone / steps:.0%} of them in batches of several tenants")
    assert steps == STEPS * len(RANKS)
    assert alone <= 0.2 * steps
