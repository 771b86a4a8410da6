"""``megascend train`` with ``engine: fsdp`` and the run file of the quick start: train, kill, resume, change the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megascend.apps.train.run_report import read_run
from megascend.testing import faults
from support.forked_programs import environment
from support.runs import exported, losses, sets

ROOT = Path(__file__).parents[3]
RUN_FILE = ROOT / "examples" / "quickstart" / "quickstart.yaml"
FSDP = ("--set", "engine=fsdp", "--set", "parallel.tensor=1")
DEADLINE_S = 240


@pytest.fixture(scope="module")
def model(megascend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the model of the quick start."""
    path = tmp_path_factory.mktemp("quickstart") / "model"
    sizes = ("--arch", "qwen3", "--hidden", "128", "--layers", "4", "--heads", "4", "--kv-heads", "2")
    megascend("new-model", path, *sizes)
    return path


def settings(model: Path, output: Path, steps: int, *more: str) -> tuple[str, ...]:
    short = "schedule.warmup_steps=0"  # the quick start's warm-up is longer than these runs
    values = (f"model={model}", f"output={output}", f"steps={steps}", "plot=false", short, *more)
    return tuple(sets(*values))


@pytest.mark.core
def test_quick_start_run_file_on_one_process(megascend, model: Path, tmp_path: Path) -> None:
    """Train, resume and report."""
    output = tmp_path / "run"
    values = (*settings(model, output, 3, "checkpoint.every=2"), *FSDP)
    printed = megascend("show-config", RUN_FILE, *values, cwd=ROOT)
    assert yaml.safe_load(printed.stdout)["engine"] == "fsdp"
    megascend("train", RUN_FILE, *values, cwd=ROOT)
    extra = (*settings(model, output, 6, "checkpoint.every=2"), *FSDP, "--resume", "auto")
    completed = megascend("train", RUN_FILE, *extra, cwd=ROOT)
    assert "resumed from" in completed.stdout
    rows_of_run = losses(output)
    assert [step for step, *_ in rows_of_run] == list(range(1, 7))
    assert rows_of_run[-1][1] < rows_of_run[0][1]
    assert (output / "hf" / "config.json").is_file()
    megascend("doctor", "--run", output)


@pytest.mark.nightly
@pytest.mark.torchrun
def test_killed_rank_under_torchrun_does_not_change_the_result(megascend, model: Path, tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    completed = megascend(
        "train", RUN_FILE, *settings(model, uninterrupted, 8), *FSDP, "--nproc", "2", cwd=ROOT, timeout=DEADLINE_S
    )
    values = settings(model, killed, 8, "checkpoint.every=3", "checkpoint.asynchronous=false")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    fault = faults.Fault("die", rank=1, phase="forward", step=5)
    completed = subprocess.run(
        [sys.executable, *launcher, "-m", "megascend.apps.cli.main", "train", str(RUN_FILE), *values, *FSDP],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment() | faults.environment(fault),
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    assert losses(killed) == losses(uninterrupted)
    assert exported(killed) == exported(uninterrupted)
    report = read_run(killed, verify=True)
    assert report.ok
    first_attempt, restarted = report.attempts
    assert (first_attempt.outcome, first_attempt.step, first_attempt.silent) == ("lost", 5, (1,))
    assert first_attempt.errors[0].error == "PeerLostError"
    assert (restarted.outcome, restarted.resumed_after) == ("finished", 3)


@pytest.mark.nightly
def test_megatron_run_is_resumed_with_fsdp(megascend, model: Path, tmp_path: Path) -> None:
    """Resume with the same command and another engine; metrics equal the uninterrupted run to rounding."""
    reference, moved = tmp_path / "reference", tmp_path / "moved"
    two = ("--nproc", "2")
    for output, steps, extra in (
        (reference, 8, ()),
        (moved, 4, ()),
        (moved, 8, (*FSDP, "--resume", "auto")),
    ):
        values = settings(model, output, steps, "checkpoint.every=4", "schedule.total_steps=8")
        completed = megascend("train", RUN_FILE, *values, *extra, *two, cwd=ROOT, timeout=DEADLINE_S)
    assert "engine: megatron -> fsdp" in completed.stdout + completed.stderr
    resumed, expected = losses(moved), losses(reference)
    assert [step for step, *_ in resumed] == list(range(1, 9))
    for row, expected_row in zip(resumed, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=2e-5, rel=2e-5)
