"""Runs on several sources of data, read before the run or streamed: shares, figures of each source, exact resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megascend.app.train import SupervisedTraining, train
from megascend.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.config import RunConfig
from megascend.data import streaming
from megascend.errors import DataError, DistributedTestError
from megascend.testing import run_distributed

DEADLINE_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_imported: object) -> Path:
    """Write a model, and two sources whose samples have 10 and 20 tokens."""
    folder = tmp_path_factory.mktemp("sources")
    write_checkpoint(folder / "model", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), 0)
    for name, digits, count in (("short", 10, 7), ("long", 20, 5)):
        lines = [{"text": f"{n:0{digits}}"} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def settings(folder: Path, output: Path, **values: Any) -> RunConfig:
    sources = [{"path": folder / "short.jsonl", "weight": 3}, {"path": folder / "long.jsonl", "weight": 1}]
    data = {"sources": sources, "global_batch_size": 4} | values.pop("data", {})
    common = {"platform": "cpu", "precision": "fp32", "self_check": False, "plot": False, "export": False}
    return RunConfig(
        model=folder / "model", output=output, data=data, steps=6, optimizer={"lr": 0.01}, **(common | values)
    )


def rows(output: Path) -> list[dict[str, Any]]:
    timings = ("tokens_per_s", "step_seconds", "dispatch_seconds", "peak_memory_bytes", "seconds", "time")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in timings} for row in lines]


def finished(output: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    return next(event for event in events if event["event"] == "finished")


def test_run_mixes_sources_and_validates_each(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, tmp_path / "run", validation={"fraction": 0.4, "every": 3})
    run_distributed(lambda: train(config), 1, init=False, timeout_s=DEADLINE_S)
    lines = rows(config.output)
    # Three short samples and a long one in every step: shares are exact, not on average.
    assert [row["total_tokens"] for row in lines] == [3 * 10 + 20] * 6
    passes = finished(config.output)["epochs"]
    # Of 7 and 5 documents, as many are held out as the passes over the rest leave.
    held_out = {
        name: round(count - draws / passes[str(folder / name)])
        for name, count, draws in (("short.jsonl", 7, 18), ("long.jsonl", 5, 6))
    }
    assert sum(held_out.values()) == round(0.4 * 12)
    assert all(held_out.values()), "the seed holds out some of both"
    assert [row["step"] for row in lines if row["validation_loss"] is not None] == [3, 6]
    tokens = {"short.jsonl": 10 * held_out["short.jsonl"], "long.jsonl": 20 * held_out["long.jsonl"]}
    for row in (lines[2], lines[5]):
        losses = {name: row[f"validation_loss/{name}"] for name in tokens}
        mean = sum(losses[name] * count for name, count in tokens.items()) / sum(tokens.values())
        assert row["validation_loss"] == pytest.approx(mean, rel=1e-5)
        assert losses["short.jsonl"] != losses["long.jsonl"]


def test_streamed_run_resumes_bitwise_equal_after_sigkill_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    data = {"streaming": True, "on_too_long": "skip", "shuffle_buffer": 3}
    reference = settings(folder, tmp_path / "reference", data=data)
    run_distributed(lambda: train(reference), 2, init=False, timeout_s=DEADLINE_S)
    expected = rows(reference.output)
    assert [row["total_tokens"] for row in expected] == [3 * 10 + 20] * 6
    passes = finished(reference.output)["epochs"]
    assert passes[str(folder / "short.jsonl")] == pytest.approx(18 / 7, abs=0.1)
    killed = settings(folder, tmp_path / "killed", data=data, checkpoint={"every": 2, "asynchronous": False})

    def killed_in_step_5() -> None:
        after_step = SupervisedTraining.after_step

        def kill(self: SupervisedTraining, number: int) -> None:
            after_step(self, number)
            if number == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        SupervisedTraining.after_step = kill
        train(killed)

    with pytest.raises(DistributedTestError, match="SIGKILL"):
        run_distributed(killed_in_step_5, 2, init=False, timeout_s=DEADLINE_S)
    run_distributed(lambda: train(killed, resume="auto"), 2, init=False, timeout_s=DEADLINE_S)
    assert rows(killed.output) == expected


def test_hosts_that_read_other_samples_stop_in_the_same_step_and_save_the_last_one(
    folder: Path, tmp_path: Path
) -> None:
    """Two files that differ in the middle, which is not compared at the start."""
    for host in range(2):
        lines = [f"{number:010}" for number in range(24)]
        lines[18] = f"{host:010}"
        (tmp_path / f"{host}").mkdir()
        (tmp_path / f"{host}" / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = {"sources": (), "path": "a.jsonl", "streaming": True, "on_too_long": "skip", "shuffle": False}
    config = settings(folder, tmp_path / "run", data=data)

    def on_a_host() -> None:
        streaming.EDGE = 64
        os.chdir(tmp_path / os.environ["RANK"])
        with pytest.raises(DataError, match=r"rank 1 on .* has read other samples than rank 0 on .* for this step"):
            train(config)

    run_distributed(on_a_host, 2, init=False, timeout_s=DEADLINE_S)
    assert [row["step"] for row in rows(config.output)] == [1, 2, 3, 4]
    assert [path.name for path in (config.output / "checkpoints").glob("step-*")] == ["step-00000004"]
