"""``megascend train`` with ``engine: fsdp`` and the run file of the quick start: trained, killed, resumed, handed over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megascend.cli.run_report import read_run
from megascend.testing import faults
from support.forked_programs import environment

ROOT = Path(__file__).parents[2]
RUN_FILE = ROOT / "examples" / "quickstart" / "quickstart.yaml"
FSDP = ("--set", "engine=fsdp", "--set", "parallel.tensor=1")
DEADLINE_S = 240


@pytest.fixture(scope="module")
def model(megascend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's."""
    path = tmp_path_factory.mktemp("quickstart") / "model"
    sizes = ("--arch", "qwen3", "--hidden", "128", "--layers", "4", "--heads", "4", "--kv-heads", "2")
    done = megascend("new-model", path, *sizes)
    assert done.returncode == 0, done.stderr
    return path


def settings(model: Path, output: Path, steps: int, *more: str) -> tuple[str, ...]:
    short = "schedule.warmup_steps=0"  # the quick start warms up for longer than these runs last
    values = (f"model={model}", f"output={output}", f"steps={steps}", "plot=false", short, *more)
    return tuple(part for value in values for part in ("--set", value))


def rows(output: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in lines]


def weights(output: Path) -> bytes:
    return (output / "hf" / "model.safetensors").read_bytes()


def test_the_run_file_of_the_quick_start_on_one_process(megascend, model: Path, tmp_path: Path) -> None:
    """Trained, resumed, looked at."""
    output = tmp_path / "run"
    values = (*settings(model, output, 3, "checkpoint.every=2"), *FSDP)
    shown = megascend("show-config", RUN_FILE, *values, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["engine"] == "fsdp"
    done = megascend("train", RUN_FILE, *values, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    more = (*settings(model, output, 6, "checkpoint.every=2"), *FSDP, "--resume", "auto")
    done = megascend("train", RUN_FILE, *more, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    found = rows(output)
    assert [step for step, *_ in found] == list(range(1, 7))
    assert found[-1][1] < found[0][1]
    assert (output / "hf" / "config.json").is_file()
    report = megascend("doctor", "--run", output)
    assert report.returncode == 0, report.stdout


@pytest.mark.nightly
@pytest.mark.torchrun
def test_a_rank_that_is_killed_under_torchrun_changes_nothing(megascend, model: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = megascend("train", RUN_FILE, *settings(model, whole, 8), *FSDP, "--nproc", "2", cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    values = settings(model, killed, 8, "checkpoint.every=3", "checkpoint.asynchronous=false")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    fault = faults.Fault("die", rank=1, phase="forward", step=5)
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "megascend.cli.main", "train", str(RUN_FILE), *values, *FSDP],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment() | faults.environment(fault),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert rows(killed) == rows(whole)
    assert weights(killed) == weights(whole)
    report = read_run(killed, verify=True)
    assert report.ok
    lost, restarted = report.attempts
    assert (lost.outcome, lost.step, lost.silent) == ("lost", 5, (1,))
    assert lost.errors[0].error == "PeerLostError"
    assert (restarted.outcome, restarted.resumed_after) == ("finished", 3)


@pytest.mark.nightly
def test_a_run_of_the_megatron_engine_is_resumed_with_this_one(megascend, model: Path, tmp_path: Path) -> None:
    """By the same command with another engine; figures as without the change, to rounding."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    two = ("--nproc", "2")
    for output, steps, more in (
        (whole, 8, ()),
        (moved, 4, ()),
        (moved, 8, (*FSDP, "--resume", "auto")),
    ):
        values = settings(model, output, steps, "checkpoint.every=4", "schedule.total_steps=8")
        done = megascend("train", RUN_FILE, *values, *more, *two, cwd=ROOT, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
    assert "engine: megatron -> fsdp" in done.stdout + done.stderr
    found, expected = rows(moved), rows(whole)
    assert [step for step, *_ in found] == list(range(1, 9))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5, rel=2e-5)
