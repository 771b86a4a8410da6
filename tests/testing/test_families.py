"""A program that a test has started ends with the test's process, with children in sessions of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import families
from families import run, started

CHILD = "import time; time.sleep(600)"
LAUNCHER = (
    "import subprocess, sys, pathlib, time; "
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True); "
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(600)"
)
TEST = f"""
import pathlib, sys, time
from families import started
with started([sys.executable, "-c", {LAUNCHER!r}, sys.argv[1]]):
    time.sleep(600)
"""


def child_of(file: Path) -> psutil.Process:
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return psutil.Process(int(file.read_text()))


def test_it_ends_with_the_block(tmp_path: Path) -> None:
    with started([sys.executable, "-c", LAUNCHER, tmp_path / "pid"]) as process:
        child = child_of(tmp_path / "pid")
        assert child.is_running()
    assert process.returncode == -9
    assert psutil.wait_procs([child], 60)[1] == []


def test_it_ends_when_the_tests_process_is_killed(tmp_path: Path) -> None:
    """As by an outer ``timeout``: no ``finally`` of it runs."""
    test = subprocess.Popen([sys.executable, "-c", TEST, tmp_path / "pid"], cwd=Path(families.__file__).parent)
    child = child_of(tmp_path / "pid")
    test.kill()
    test.wait()
    assert psutil.wait_procs([child], 60)[1] == []


def test_a_deadline_ends_it_too(tmp_path: Path) -> None:
    for deadline_s in (5, 60):  # on a busy machine it may not have started its child within the first
        with pytest.raises(subprocess.TimeoutExpired):
            run([sys.executable, "-c", LAUNCHER, tmp_path / "pid"], deadline_s)
        if (tmp_path / "pid").exists():
            break
    pid, until = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "it is still there"
        time.sleep(0.02)


def test_its_output_and_exit_code() -> None:
    done = run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
