"""Runs on several sources of data, read before the run or streamed: shares, figures of each source, exact resume."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.data import streaming
from megascend.apps.train.supervised import SupervisedLearner
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.errors import DataError, DistributedTestError
from megascend.testing import run_distributed
from support.runs import checkpoints, events, run_config, tiny_run, untimed, write_lines

DEADLINE_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_imported: object) -> Path:
    """Write a model, and two sources whose samples have 10 and 20 tokens."""
    folder = tiny_run(tmp_path_factory.mktemp("sources"))
    for name, digits, count in (("short", 10, 7), ("long", 20, 5)):
        write_lines(folder / f"{name}.jsonl", ({"text": f"{n:0{digits}}"} for n in range(count)))
    return folder


def settings(folder: Path, output: Path, **values: Any) -> RunConfig:
    sources = [{"path": folder / "short.jsonl", "weight": 3}, {"path": folder / "long.jsonl", "weight": 1}]
    data = {"sources": sources, "global_batch_size": 4} | values.pop("data", {})
    return run_config(folder, output, **({"steps": 6} | values | {"data": data}))


def test_run_mixes_sources_and_validates_each(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, tmp_path / "run", validation={"fraction": 0.4, "every": 3})
    run_distributed(lambda: train(config), 1, init=False, timeout_s=DEADLINE_S)
    lines = untimed(config.output)
    # Three short samples and a long one in every step: shares are exact, not on average.
    assert [row["total_tokens"] for row in lines] == [3 * 10 + 20] * 6
    passes = events(config.output, "finished")[0]["epochs"]
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


def test_resumed_run_of_another_batch_size_has_the_reference_of_its_pairs(folder: Path, tmp_path: Path) -> None:
    """Compare the loss with log 2, DPO's for every pair while the model is its reference: the learning rate is 0."""
    lines = [{"prompt": f"{n} ", "chosen": f"c{n}", "rejected": f"r{n}x"} for n in range(40)]
    write_lines(tmp_path / "pairs.jsonl", lines)

    def config(steps: int, size: int) -> RunConfig:
        data = {"path": tmp_path / "pairs.jsonl", "sources": (), "global_batch_size": size}
        values = {"steps": steps, "dpo": {"beta": 0.5}, "optimizer": {"lr": 0.0}, "checkpoint": {"every": 2}}
        return settings(folder, tmp_path / "run", data=data, **values)

    run_distributed(lambda: train(config(2, 8)), 1, init=False, timeout_s=DEADLINE_S)
    run_distributed(lambda: train(config(4, 2), resume="auto"), 1, init=False, timeout_s=DEADLINE_S)
    assert [row["loss"] for row in untimed(tmp_path / "run")] == pytest.approx([math.log(2)] * 4, abs=1e-6)
    with pytest.raises(DistributedTestError, match="steps: 3, and the checkpoint to resume from is after step 4"):
        run_distributed(lambda: train(config(3, 2), resume="auto"), 1, init=False, timeout_s=DEADLINE_S)


def test_best_value_of_other_held_out_samples_is_forgotten(folder: Path, tmp_path: Path) -> None:
    """Hold out a learned sample in the first part, whose loss no sample of the second one reaches."""

    def config(held_out: str, steps: int) -> RunConfig:
        (tmp_path / "held_out.jsonl").write_text(held_out)
        validation = {"path": tmp_path / "held_out.jsonl", "every": 1, "keep_best": True, "patience": 3}
        values = {"data": {"global_batch_size": 2}, "checkpoint": {"every": 1}}
        return settings(folder, tmp_path / "run", steps=steps, validation=validation, **values)

    easy, hard = (json.dumps({"text": text}) + "\n" for text in ("0000000000", "zyxwvutsrqponmlk"))
    run_distributed(lambda: train(config(easy, 8)), 1, init=False, timeout_s=DEADLINE_S)
    run_distributed(lambda: train(config(hard, 12), resume="auto"), 1, init=False, timeout_s=DEADLINE_S)
    losses = [row["validation_loss"] for row in untimed(tmp_path / "run")]
    assert len(losses) == 12, "a best value of other samples would have ended the run early"
    last = json.loads((tmp_path / "run" / "checkpoints" / "step-00000012" / "megascend.json").read_text())
    best = min(losses[8:])
    assert min(losses[:8]) < best
    assert last["progress"]["counts"]["best_value"] == pytest.approx(best)


def test_streamed_run_resumes_bitwise_equal_after_sigkill_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    data = {"streaming": True, "on_too_long": "skip", "shuffle_buffer": 3}
    reference = settings(folder, tmp_path / "reference", data=data)
    run_distributed(lambda: train(reference), 2, init=False, timeout_s=DEADLINE_S)
    expected = untimed(reference.output)
    assert [row["total_tokens"] for row in expected] == [3 * 10 + 20] * 6
    passes = events(reference.output, "finished")[0]["epochs"]
    assert passes[str(folder / "short.jsonl")] == pytest.approx(18 / 7, abs=0.1)
    killed = settings(folder, tmp_path / "killed", data=data, checkpoint={"every": 2, "asynchronous": False})

    def killed_in_step_5() -> None:
        after_step = SupervisedLearner.after_step

        def kill(self: SupervisedLearner, number: int) -> None:
            after_step(self, number)
            if number == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        SupervisedLearner.after_step = kill
        train(killed)

    with pytest.raises(DistributedTestError, match="SIGKILL"):
        run_distributed(killed_in_step_5, 2, init=False, timeout_s=DEADLINE_S)
    run_distributed(lambda: train(killed, resume="auto"), 2, init=False, timeout_s=DEADLINE_S)
    assert untimed(killed.output) == expected


def test_hosts_that_read_other_samples_stop_in_the_same_step_and_save_the_last_one(
    folder: Path, tmp_path: Path
) -> None:
    """Two files that differ in the middle, which is not compared at the start."""
    for host in range(2):
        lines = [f"{number:010}" for number in range(24)]
        lines[18] = f"{host:010}"
        (tmp_path / f"{host}").mkdir()
        write_lines(tmp_path / f"{host}" / "a.jsonl", ({"text": line} for line in lines))
    data = {"sources": (), "path": "a.jsonl", "streaming": True, "on_too_long": "skip", "shuffle": False}
    config = settings(folder, tmp_path / "run", data=data)

    def on_a_host() -> None:
        streaming.EDGE = 64
        os.chdir(tmp_path / os.environ["RANK"])
        with pytest.raises(DataError, match=r"rank 1 on .* has read other samples than rank 0 on .* for this step"):
            train(config)

    run_distributed(on_a_host, 2, init=False, timeout_s=DEADLINE_S)
    assert [row["step"] for row in untimed(config.output)] == [1, 2, 3, 4]
    assert checkpoints(config.output) == [4]
