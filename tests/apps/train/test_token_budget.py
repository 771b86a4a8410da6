"""``batching.micro_batch_tokens: auto`` in full runs, on CPUs with simulated device memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.config import RunConfig
from megascend.errors import ConfigError
from megascend.runtime.platforms.base import MemoryFigures
from megascend.runtime.platforms.cpu import CpuPlatform
from megascend.testing import run_distributed
from support.runs import events, metrics, run_config, write_lines
from support.tensor_memory import TensorMemory

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    write_checkpoint(folder / "model", ModelSize(hidden=64, layers=2, context=512))
    # 213 tokens; numbers first, since a common beginning would be computed once, in less memory than the trial's.
    texts = [{"text": f"{number:02}" + "all work and no play " * 10} for number in range(64)]
    write_lines(folder / "texts.jsonl", texts)
    return folder


def config(folder: Path, output: str, **settings: Any) -> RunConfig:
    usual: dict[str, Any] = {
        "data": {"path": folder / "texts.jsonl", "global_batch_size": 32},
        "steps": 4,
        "precision": "bf16",
        "batching": {"micro_batch_tokens": "auto"},
        "checkpoint": {"every": 2},
        "optimizer": {},
    }
    return run_config(folder, folder / output, **(usual | settings))


def train(run: RunConfig, room: int, resume: str | None = None) -> tuple[int, list[Any]]:
    """Train on this rank with ``room`` bytes of tensor memory; return the second step's peak and all budgets found."""
    from megascend.apps.train.train import train

    with TensorMemory() as memory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "reports_peak_memory", True)
        patch.setattr(CpuPlatform, "memory", lambda self: MemoryFigures(memory.allocated, memory.peak, room))
        patch.setattr(CpuPlatform, "reset_peak_memory", lambda self: memory.reset_peak())
        train(run, resume=resume)
    found = [event["found"] for event in events(run.output, "micro_batch_tokens")]
    return metrics(run.output)[1]["peak_memory_bytes"], found


def losses(run: RunConfig) -> list[float]:
    return [row["loss"] for row in metrics(run.output)]


@pytest.mark.nightly  # covered: models/memory/test_measured_peaks.py; the choice of a budget
def test_budget_fills_the_memory_and_is_kept_on_resume(megatron_imported, folder: Path, capfd) -> None:
    run, room = config(folder, "auto"), 24 * MIB

    def on_rank() -> dict[str, Any]:
        peak, [budget] = train(run.model_copy(update={"steps": 2}), room)
        _, resumed = train(run, 10 * room, resume="auto")  # there would be room for more now
        numbered = run.model_copy(update={"output": folder / "number", "batching": run.batching.with_budget(budget)})
        train(numbered, room)
        return {"peak": peak, "found": budget, "resumed": resumed, "losses": losses(run), "numbered": losses(numbered)}

    [result] = run_distributed(on_rank, 1, init=False)
    assert 0.75 * room < result["peak"] <= room
    assert result["resumed"] == [result["found"]] * 2
    assert 256 < result["found"] < 32 * 213
    # The search leaves no trace in gradients, moments and random streams.
    assert result["losses"] == result["numbered"]


@pytest.mark.nightly
@pytest.mark.parametrize("world", ["DP2", "LoRA"])
def test_ranks_agree_on_the_budget(megatron_imported, folder: Path, world: str) -> None:
    lora = {"lora": {"rank": 4, "dropout": 0.1}} if world == "LoRA" else {}
    run, room = config(folder, world, **lora), (12 if lora else 16) * MIB

    def on_rank() -> tuple[int, list[float], list[float]]:
        limit = room if os.environ["RANK"] == "1" else 2 * room
        _, budget = train(run, limit)
        numbered = run.model_copy(
            update={"output": folder / f"{world}-2", "batching": run.batching.with_budget(budget[0])}
        )
        train(numbered, limit)
        return budget[0], losses(run), losses(numbered)

    results = run_distributed(on_rank, 2, init=False)
    assert results[0] == results[1]
    budget, auto, number = results[0]
    assert auto == number
    assert 256 < budget < 16 * 213
    peak = metrics(run.output)[1]["peak_memory_bytes"]  # of rank 0
    assert 0.6 * room < peak <= room


def test_platform_without_peak_memory_is_refused(folder: Path) -> None:
    from megascend.apps.train.token_budget import check_platform

    with pytest.raises(ConfigError, match=r"platform cpu does not report: set a number"):
        check_platform(config(folder, "no"), CpuPlatform())
