"""Signals and restarts of real runs: the files that remain, and bitwise equality of resumed and uninterrupted runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train.run_report import read_run
from megascend.testing import faults
from support import families
from support.forked_programs import environment
from support.runs import DEADLINE_S, chats, exported, losses, sets, wait_for_steps, write_lines, write_run

pytestmark = pytest.mark.slow
ENDLESS = 1_000_000
STEPS = 40  # of a resumed run, unless the signal came late on a busy machine


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with data and settings."""
    folder = tmp_path_factory.mktemp("resume")
    write_lines(folder / "chat.jsonl", chats())
    data = {"path": "chat.jsonl", "global_batch_size": 2}
    write_run(folder, model=str(small_model), data=data, steps=ENDLESS, optimizer={"lr": 0.001})
    return folder


@pytest.fixture(scope="module")
def uninterrupted(megascend, folder: Path) -> Callable[[int], Path]:
    """Return a function that returns the directory of an uninterrupted run of so many steps on two ranks."""

    def run(steps: int) -> Path:
        output = folder / f"uninterrupted-{steps}"
        if not output.is_dir():
            arguments = ("--nproc", "2", *sets(f"output={output}", f"steps={steps}"))
            megascend("train", "run.yaml", *arguments, cwd=folder, timeout=DEADLINE_S)
        return output

    return run


def train_command(*arguments: str, torchrun: Sequence[str] | None = None) -> list[str]:
    """Return ``megascend train run.yaml ...``, under torchrun on two ranks if options for it are given."""
    launcher = (
        [] if torchrun is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *torchrun]
    )
    return [sys.executable, *launcher, "-m", "megascend.apps.cli.main", "train", "run.yaml", *arguments]


@contextlib.contextmanager
def started(command: list[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own process group, as a shell does; all its processes have ended after the context."""
    # A shell ignores SIGINT for what it runs in the background.
    as_in_a_terminal = ["env", "--default-signal=INT", *command]
    options: dict[str, Any] = {"cwd": folder, "env": environment(), "start_new_session": True}
    with (
        log.open("wb") as file,
        families.started(as_in_a_terminal, stdout=file, stderr=file, **options) as process,
    ):
        yield process


def stopped_after(output: Path, by: str) -> int:
    """Return the last step of a stopped run, after checking its files."""
    report = read_run(output, verify=True)
    assert report.ok
    (attempt,) = report.attempts
    last = losses(output)[-1][0]
    assert (attempt.outcome, attempt.signal, attempt.step) == ("stopped", by, last)
    assert (output / "checkpoints" / "latest").read_text().strip() == f"step-{last:08d}" == report.latest
    assert report.last_good is not None
    assert report.last_good.step == last
    assert report.unfinished == ()
    assert not (output / "hf").exists()
    return last


@pytest.mark.nightly
@pytest.mark.torchrun
def test_ctrl_c_under_torchrun_and_killed_rank_after_resume(folder, uninterrupted) -> None:
    output, log = folder / "torchrun", folder / "torchrun.log"
    with started(train_command("--set", f"output={output}", torchrun=[]), folder, log) as process:
        wait_for_steps(process, output, 3, log)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does; torchrun sends its workers another one
        assert process.wait(DEADLINE_S) == 1, log.read_text()[-4000:]  # torchrun's own
    last = stopped_after(output, "SIGINT")

    saved = (last // 4 + 2) * 4
    steps = max(STEPS, saved + 4)
    fault = faults.Fault("die", rank=1, phase="forward", step=saved + 2)
    settings = (f"output={output}", f"steps={steps}", "checkpoint.every=4", "checkpoint.asynchronous=false")
    extra = [*sets(*settings), "--resume", "auto"]
    completed = subprocess.run(
        train_command(*extra, torchrun=["--max-restarts=1"]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment() | faults.environment(fault),
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    reference = uninterrupted(steps)
    assert losses(output) == losses(reference)
    assert exported(output) == exported(reference)

    report = read_run(output, verify=True)
    assert report.ok
    first, killed, restarted = report.attempts
    assert (first.outcome, first.step) == ("stopped", last)
    assert (killed.outcome, killed.step, killed.resumed_after) == ("lost", saved + 2, last)
    assert (killed.silent, [error.rank for error in killed.errors]) == ((1,), [0])
    assert killed.errors[0].error == "PeerLostError"
    assert (restarted.outcome, restarted.restart, restarted.resumed_after) == ("finished", 1, saved)
    assert all(not checkpoint.problems for checkpoint in report.checkpoints)


@pytest.mark.nightly
def test_second_ctrl_c_ends_two_ranks_at_once(folder) -> None:
    output, log = folder / "twice-on-two-ranks", folder / "twice-on-two-ranks.log"
    with started(train_command("--nproc", "2", "--set", f"output={output}"), folder, log) as process:
        wait_for_steps(process, output, 2, log)
        workers = sorted({json.loads(line)["pid"] for line in (output / "events.jsonl").read_text().splitlines()})
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # so that it cannot save before the second one comes
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130, log.read_text()[-4000:]
    assert "interrupted" in log.read_text()
    assert read_run(output).attempts[-1].outcome in ("no end", "interrupted", "lost")


def test_rank_that_waits_in_vain_leaves_its_error(megascend, folder, tmp_path) -> None:
    output = folder / "alone"
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MEGASCEND_STORE": str(tmp_path / "store")}
    settings = sets(f"output={output}", "timeout_s=3")
    megascend("train", "run.yaml", *settings, cwd=folder, **launched, code=2)
    report = read_run(output)
    (attempt,) = report.attempts
    assert (attempt.started, attempt.outcome, attempt.silent) == (None, "lost", (1,))
    assert attempt.errors[0].error == "CollectiveTimeoutError"
    completed = megascend("doctor", "--run", output, code=1)
    assert "failed before its first step; 2 ranks" in completed.stdout
    assert "rank 1 left no error" in completed.stdout
