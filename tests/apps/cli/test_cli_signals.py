"""Signals that end a run, and outputs that are lost while it trains: it saves and ends with its code, or goes on.

A plug-in does both from within: it gives the process the output, and sends it the signal after a few steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train.run_report import read_run
from megascend.runtime.stop_signals import STOPPING
from support import families, forked_programs
from support.runs import DEADLINE_S, events, sets, wait_for_steps, write_lines, write_run

PLUGIN = """
import os, pty, signal, threading, time

def broken_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing

def closed_terminal():
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs

OUTPUTS = {
    "full disk": lambda: os.open("/dev/full", os.O_WRONLY),
    "broken pipe": broken_pipe,
    "closed terminal": closed_terminal,
    "read-only": lambda: os.open("/dev/null", os.O_RDONLY),
}
if os.environ["OUTPUT"] in OUTPUTS:
    lost = OUTPUTS[os.environ["OUTPUT"]]()
    os.dup2(lost, 1)
    os.dup2(lost, 2)

def send():
    metrics = os.path.join(os.environ["RUN"], "metrics.jsonl")
    while not os.path.exists(metrics) or len(open(metrics).readlines()) < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))

if os.environ["SIGNAL"] != "0":
    number = int(os.environ["SIGNAL"])
    if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    threading.Thread(target=send, daemon=True).start()
"""
ENDLESS = 1_000_000
SIGNALS_AND_OUTPUTS = [
    (signal.SIGHUP, "closed terminal"),
    *(
        pytest.param(number, output, marks=pytest.mark.nightly)
        for number, output in [
            *((number, "kept") for number in STOPPING),
            *((signal.SIGTERM, output) for output in ("full disk", "broken pipe", "read-only")),
        ]
    ),
]


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with data, settings and the plug-in."""
    folder = tmp_path_factory.mktemp("signals")
    write_lines(folder / "texts.jsonl", ({"text": f"number {n}"} for n in range(4)))
    (folder / "signals_plugin.py").write_text(PLUGIN)
    data = {"path": "texts.jsonl", "global_batch_size": 2}
    write_run(folder, model=str(small_model), data=data, engine="single", plugins=["signals_plugin"])
    return folder


def plugin_settings(run: Path, output: str, number: int) -> dict[str, str]:
    return {"OUTPUT": output, "SIGNAL": str(number), "RUN": str(run)}


def variables(folder: Path, run: Path, output: str = "kept", number: int = 0) -> dict[str, str]:
    inherited = forked_programs.environment(**plugin_settings(run, output, number))
    return inherited | {"PYTHONPATH": f"{folder}:{inherited['PYTHONPATH']}"}


def arguments(run: Path, steps: int) -> list[str]:
    return ["train", "run.yaml", *sets(f"output={run}", f"steps={steps}")]


def lost(run: Path) -> set[str]:
    return {event["stream"] for event in events(run, "output_lost")}


def assert_saved(run: Path, by: str) -> None:
    report = read_run(run, verify=True)
    (attempt,) = report.attempts
    last = report.metrics[-1]["step"]
    assert (attempt.outcome, attempt.signal, attempt.step) == ("stopped", by, last)
    assert report.last_good is not None
    assert report.last_good.step == last < ENDLESS


@pytest.mark.parametrize(("number", "output"), SIGNALS_AND_OUTPUTS)
def test_signal_saves_and_stops_even_if_output_is_lost(
    folder: Path, tmp_path: Path, number: signal.Signals, output: str
) -> None:
    run = tmp_path / "run"
    completed = forked_programs.run_forked(
        forked_programs.PLUGGED_COMMAND,
        *arguments(run, ENDLESS),
        directory=folder,
        timeout_s=DEADLINE_S,
        variables=forked_programs.environment(**plugin_settings(run, output, number)),
    )
    assert completed.returncode == 75, completed.stderr
    assert_saved(run, number.name)
    assert lost(run) == (set() if output == "kept" else {"stdout", "stderr"})


@contextlib.contextmanager
def started(
    folder: Path, run: Path, *launcher: str, nproc: bool = False, shell: str = "", before: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Start a run of two ranks from a shell, in its own session; all processes have ended after the context."""
    words = [
        sys.executable,
        *launcher,
        "-m",
        "megascend.apps.cli.main",
        *arguments(run, ENDLESS),
        "--set",
        "engine=megatron",
    ]
    command = " ".join([*words, *(("--nproc", "2") if nproc else ())])
    options: dict[str, Any] = {"cwd": folder, "env": variables(folder, run), "start_new_session": True}
    shell_command = ["bash", "-c", f"exec {before}{command} {shell}"]
    with families.started(shell_command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as process:
        yield process


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "shell"),
    [*((number, "") for number in STOPPING), (signal.SIGTERM, "> /dev/full 2>&1"), (signal.SIGTERM, ">&- 2>&-")],
)
def test_signal_to_the_launcher_of_two_ranks(folder: Path, tmp_path: Path, number: signal.Signals, shell: str) -> None:
    run = tmp_path / "run"
    with started(folder, run, nproc=True, shell=shell) as process:
        wait_for_steps(process, run)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 75
    assert_saved(run, "SIGTERM" if number is signal.SIGINT else number.name)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_to_torchrun(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Send signals that torchrun forwards; its exit code is its own."""
    run = tmp_path / "run"
    with started(folder, run, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2") as process:
        wait_for_steps(process, run)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) != 0
    assert_saved(run, number.name)


@pytest.mark.nightly
@pytest.mark.slow
def test_nohup_run_survives_a_lost_terminal(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(folder, run, nproc=True, shell="2> /dev/null", before="nohup ") as process:
        wait_for_steps(process, run)
        os.killpg(process.pid, signal.SIGHUP)  # as a terminal does
        wait_for_steps(process, run, len(read_run(run).metrics) + 5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 75
    assert_saved(run, "SIGTERM")
