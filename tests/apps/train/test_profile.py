"""Traces of steps: the choice of steps, the summary table, and the size limit."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megascend.apps.train.profile import ProfileRow, StepProfiler, busy_micros, kernels, recorded, render
from megascend.config import Profile
from megascend.runtime.platforms.cpu import CpuPlatform


def event(name: str, start: float, took: float, category: str = "cpu_op", thread: int = 1) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": took, "pid": 1, "tid": thread}


HOST = [
    event("linear", 0, 100),
    event("matmul", 10, 60),
    event("copy", 20, 10),
    event("copy", 75, 5),
    event("linear", 100, 50),
    event("copy", 0, 7, thread=2),
    event("cudaLaunchKernel", 12, 3, category="cuda_runtime"),
    {"ph": "M", "name": "process_name"},
]
DEVICE = [event("gemm", 0, 40, "kernel", 7), event("gemm", 60, 20, "kernel", 7), event("add", 30, 20, "kernel", 8)]


def test_device_is_busy_while_any_kernel_runs() -> None:
    assert kernels(HOST + DEVICE) == [ProfileRow("gemm", 2, 60.0), ProfileRow("add", 1, 20.0)]
    assert busy_micros(HOST + DEVICE) == 70.0
    text = render(HOST + DEVICE, steps=2, seconds=140e-6)
    assert "busy for 50% of" in text
    assert re.search(r"^ +0\.030 +42\.9% +1\.0  gemm$", text, re.MULTILINE)
    assert re.search(r"^ +0\.011 +15\.7% +1\.5  copy$", text, re.MULTILINE)
    assert "device" not in render(HOST, steps=2, seconds=140e-6)


def test_recorded_steps_of_long_and_short_runs() -> None:
    assert recorded(range(1, 101), after=3, count=3) == range(4, 7)
    assert recorded(range(51, 101), after=3, count=3) == range(54, 57)
    assert recorded(range(1, 5), after=3, count=3) == range(2, 5)
    assert recorded(range(1, 2), after=3, count=3) == range(1, 2)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[int]]:
    """Return a function that runs steps of two matrix products each and returns their numbers."""
    import torch

    def run(settings: Profile, steps: int = 8, rank: int = 0) -> list[int]:
        profiler = StepProfiler(settings, tmp_path, CpuPlatform(), rank, range(1, steps + 1))
        numbers = []
        for number in range(1, steps + 1):
            with profiler.step(number):
                matrix = torch.ones(8, 8)
                for _ in range(2):
                    matrix = matrix @ matrix
                numbers.append(number)
        profiler.finish()
        return numbers

    return run


def test_trace_contains_only_the_recorded_steps(
    train: Callable[..., list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(Profile(after=2, steps=3)) == list(range(1, 9))
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["top-rank-0.txt", "trace-rank-0.json.gz"]
    events = json.loads(gzip.decompress((folder / "trace-rank-0.json.gz").read_bytes()))["traceEvents"]
    annotations = [entry["name"] for entry in events if entry.get("cat") == "user_annotation"]
    assert [name for name in annotations if name.startswith("megascend")] == [f"megascend: step {n}" for n in (3, 4, 5)]
    assert sum(entry["name"] == "aten::mm" for entry in events) == 6
    table = (folder / "top-rank-0.txt").read_text()
    assert table.startswith("steps 3 to 5: 3 steps, ")
    assert re.search(r" 2\.0  aten::mm$", table, re.MULTILINE)
    assert f"steps 3 to 5 in {folder / 'trace-rank-0.json.gz'}" in capsys.readouterr().out


def test_other_ranks_record_only_with_ranks_all(train: Callable[..., list[int]], tmp_path: Path) -> None:
    train(Profile(), rank=1)
    assert not (tmp_path / "profile").exists()
    train(Profile(ranks="all"), rank=1)
    assert (tmp_path / "profile" / "top-rank-1.txt").exists()
