"""All processes of an engine, including the watcher, end when the process that started them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_until

ROOT = Path(__file__).parents[5]
DEADLINE_S = 60.0

SERVER = """#!{python}
import os, signal, sys, time

def child(kind):
    if os.fork():
        return
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "group":
        os.setpgrp()
    note(kind)
    time.sleep(1000)

def note(kind):
    with open({pids!r}, "a") as file:
        file.write(f"{{kind}} {{os.getpid()}}\\n")

for kind in ("worker", "deaf", "group"):
    child(kind)
note("server")
time.sleep(1000)
"""
"""Stand-in for vLLM: workers, one of which ignores SIGTERM, and one of which is in a separate process group."""

TRAINER = """
import os, signal, sys, time
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess

server, folder = sys.argv[1:]
process = VllmProcess(server, "model", log=folder + "/log")
if os.fork() == 0:
    time.sleep(1000)  # the child inherits the pipe by which the watcher would notice the parent's end
print(process.pid, flush=True)
time.sleep(1000)
"""
KINDS = ("server", "worker", "deaf", "group")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "server"
    path.write_text(SERVER.format(python=sys.executable, pids=str(tmp_path / "pids")))
    path.chmod(0o755)
    yield path
    for process in running_processes(tmp_path):
        process.kill()


def running_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command names the folder: the stand-in's, and its watchers."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(folder / "server") in " ".join(process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def kinds(folder: Path) -> dict[str, int]:
    path = folder / "pids"
    lines = path.read_text().splitlines() if path.exists() else []
    return {kind: int(number) for kind, number in (line.split() for line in lines)}


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path, server: Path) -> None:
    """Kill as Ray does, with an actor's direct children; a process forked by the trainer may stay."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(server), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        start_new_session=True,
    )
    try:
        assert trainer.stdout is not None
        leader = int(trainer.stdout.readline())
        wait_until(lambda: set(kinds(tmp_path)) == set(KINDS), "the stand-in did not start")
        assert kinds(tmp_path)["server"] == leader
        os.kill(leader, signal.SIGKILL)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        engine = {*kinds(tmp_path).values()}
        # Not psutil.pid_exists: an orphan that has ended stays a zombie until init reaps it, which took a minute here.
        wait_until(
            lambda: not any(process.pid in engine for process in running_processes(tmp_path)),
            "processes of the engine are left",
        )
        is_trainer = lambda process: process.cmdline()[1:2] == ["-c"]  # noqa: E731
        wait_until(lambda: all(is_trainer(process) for process in running_processes(tmp_path)), "the watcher is left")
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


def test_close_ends_remaining_processes_and_the_watcher(tmp_path: Path, server: Path) -> None:
    from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess

    with VllmProcess(server, "model", log=tmp_path / "log") as process:
        wait_until(lambda: set(kinds(tmp_path)) == set(KINDS), "the stand-in did not start")
        process.check()
    wait_until(lambda: not running_processes(tmp_path), "processes are left")


def test_guarded_program_inherits_the_state_of_a_plain_child(tmp_path: Path) -> None:
    """Compare descriptors and signal masks with a plain child; the guarded one leads its own session."""
    from megascend.apps.rl.rollout.engines.guarded import GuardedProcess

    report = "ls /proc/self/fd | wc -l; grep SigIgn /proc/self/status; ps -o sid= -p $$; echo $$"
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc on this system: what a process has cannot be listed")
    plain = subprocess.run(["sh", "-c", report], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    with (tmp_path / "out").open("wb") as output:
        guarded = GuardedProcess(["sh", "-c", report], output=output)
    assert guarded.process.wait(DEADLINE_S) == 0
    guarded.release()
    expected, actual = plain.stdout.split("\n"), (tmp_path / "out").read_text().split("\n")
    assert actual[:2] == expected[:2]
    assert int(actual[2]) == int(actual[3]) == guarded.process.pid


def test_exited_program_reports_its_code_and_leaves_no_watcher(tmp_path: Path, server: Path) -> None:
    from megascend.apps.rl.rollout.engines.guarded import GuardedProcess

    server.write_text("#!/bin/sh\nexit 3\n")
    guarded = GuardedProcess([str(server)])
    assert guarded.process.wait(DEADLINE_S) == 3
    wait_until(lambda: not running_processes(tmp_path), "the watcher is left")
    guarded.release()
    missing = GuardedProcess([str(tmp_path / "none")], output=(tmp_path / "out").open("wb"))
    assert missing.process.wait(DEADLINE_S) == 127
    assert "No such file" in (tmp_path / "out").read_text()
    missing.release()
