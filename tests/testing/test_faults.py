"""Faults that are injected: what can be armed, when it fires, and files and disks that are damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megascend.diagnostics.hang_monitor import HangMonitor
from megascend.errors import ConfigError, DistributedTestError, PlatformError
from megascend.testing import Lost, faults, run_distributed
from megascend.testing.faults import Fault


def armed(*of: Fault, rank: int = 0, attempt: int = 0) -> HangMonitor:
    with faults.inject(*of):
        return HangMonitor(rank, 1, 10.0, attempt=attempt)


def test_a_fault_fires_once_at_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with faults.inject(Fault("raise", 0, "update", step=2)):
        monitor = HangMonitor(0, 1, 10.0)
        assert "rank 0: FAULTS ARE ARMED (MEGASCEND_FAULTS): raise in update of step 2 on rank 0" in caplog.text
        with monitor.phase("update"), monitor.phase("forward"):
            pass
        monitor.step = 2
        with monitor.phase("forward"):
            pass
        with pytest.raises(RuntimeError, match="injected fault: raise in update of step 2"), monitor.phase("update"):
            pytest.fail("the body ran")
        with monitor.phase("update"):
            pass
        again = HangMonitor(0, 1, 10.0)  # made anew in the same process
        again.step = 2
        with again.phase("update"):
            pass
    assert faults.VARIABLE not in os.environ


def test_of_several_faults_each_rank_and_attempt_takes_its_own() -> None:
    several = [Fault("raise", 1, "update"), Fault("skip", 1, "grad reduce"), Fault("raise", 1, "update", attempt=1)]
    assert armed(*several, rank=0)._faults is None
    monitor = armed(*several, rank=1)
    ran = []
    monitor.call("grad reduce", ran.append, 1)
    monitor.call("grad reduce", ran.append, 2)
    assert ran == [2]
    with pytest.raises(RuntimeError, match="injected fault"):
        monitor.call("update", ran.append, 3)
    assert str(armed(*several, rank=1, attempt=1)._faults) == "raise in update on rank 1"


def test_a_fault_that_never_fires_is_told(caplog: pytest.LogCaptureFixture) -> None:
    armed(Fault("raise", 0, "updaet")).close()
    assert "rank 0: armed, but never fired: raise in updaet on rank 0" in caplog.text


def test_a_phase_whose_result_is_needed_cannot_be_skipped() -> None:
    monitor = armed(Fault("skip", 0, "forward"))
    with pytest.raises(ConfigError, match="the phase 'forward' cannot be skipped"), monitor.phase("forward"):
        pytest.fail("the body ran")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "MEGASCEND_FAULTS='{' cannot be read"),
        ("3", "cannot be read"),
        ('[{"action": "die"}]', "missing 2 required positional arguments"),
        ('[{"action": "explode", "rank": 0, "phase": "update"}]', "action must be one of die, stop, hang, skip, raise"),
        ('[{"action": "die", "rank": -1, "phase": "update"}]', "rank must be a whole number from 0, got -1"),
        ('[{"action": "die", "rank": 0, "phase": "update", "step": 0}]', "step must be a whole number from 1, got 0"),
        ('[{"action": "die", "rank": "0", "phase": "update"}]', "rank must be a whole number from 0, got '0'"),
        ('[{"action": "die", "rank": 0, "phase": ""}]', "phase must be a name"),
        ('[{"action": "die", "rank": 0, "phase": "update", "when": 3}]', "unexpected keyword argument 'when'"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        HangMonitor(0, 1, 10.0)
    assert message in str(caught.value)


def test_the_variable_holds_what_was_armed_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    of = [Fault("die", 1, "write", step=3), Fault("hang", 0, "save", attempt=2)]
    assert faults.read(faults.environment(*of)[faults.VARIABLE]) == of
    with faults.inject(of[0]):
        with faults.inject(of[1]):
            assert faults.read(os.environ[faults.VARIABLE]) == of[1:]
        assert faults.read(os.environ[faults.VARIABLE]) == of[:1]


def test_without_faults_the_module_is_not_imported() -> None:
    code = """
import sys
from megascend.diagnostics.hang_monitor import HangMonitor
HangMonitor(0, 1, 1.0)
print("megascend.testing.faults" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "False\n"


def wait_until_lost(note: Path, action: faults.Action) -> None:
    """Wait until the process whose number is in ``note`` has ended, or stopped; one that hangs, until it has begun."""
    until = time.monotonic() + 60
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(note.read_text()))
        while action != "hang" and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(("action", "status"), [("die", -signal.SIGKILL), ("stop", None), ("hang", None)])
def test_ranks_that_are_lost(action: faults.Action, status: int | None, tmp_path: Path) -> None:
    def work() -> str:
        rank = int(os.environ["RANK"])
        monitor = HangMonitor(rank, 1, 10.0)
        if rank == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
        else:
            wait_until_lost(tmp_path / "pid", action)
        with monitor.phase("work"):
            pass
        return f"rank {rank} is through"

    with faults.inject(Fault(action, 1, "work")):
        assert run_distributed(work, 3, init=False, expect_lost={1}, timeout_s=30) == [
            "rank 0 is through",
            Lost(status),
            "rank 2 is through",
        ]


def test_a_rank_that_was_to_be_lost_and_is_not() -> None:
    with pytest.raises(DistributedTestError, match="rank 1 was expected to be lost, but rank 1 returned"):
        run_distributed(
            lambda: time.sleep(60 * (os.environ["RANK"] == "0")), 2, init=False, expect_lost={1}, timeout_s=30
        )


# --- files ---


def test_truncate_and_flip(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(9)))
    os.utime(path, ns=(5, 7))
    assert faults.flip_byte(path) == 4
    assert path.read_bytes() == bytes([0, 1, 2, 3, 251, 5, 6, 7, 8])
    assert path.stat().st_mtime_ns == 7
    faults.flip_byte(path, 4)
    faults.truncate(path, 6)
    assert path.read_bytes() == bytes(range(6))
    with pytest.raises(ConfigError, match="has 6 bytes; cannot keep 6 of them and lose some"):
        faults.truncate(path, 6)
    with pytest.raises(ConfigError, match="has 6 bytes, none at 6"):
        faults.flip_byte(path, 6)


def test_a_full_disk() -> None:
    try:
        with faults.full_disk(64 * 1024) as disk:
            (disk / "fits").write_bytes(bytes(60 * 1024))
            with pytest.raises(OSError, match="No space left") as caught:
                (disk / "does not").write_bytes(bytes(60 * 1024))
            assert caught.value.errno == errno.ENOSPC
    except PlatformError as error:
        pytest.skip(str(error))
    assert not disk.exists()


def test_a_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    try:
        with faults.read_only(tmp_path) as seen:
            assert (seen / "file").read_text() == "x"
            with pytest.raises(OSError, match="Read-only") as caught:
                (seen / "file").write_text("y")
            assert caught.value.errno == errno.EROFS
    except PlatformError as error:
        pytest.skip(str(error))
    (tmp_path / "file").write_text("z")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not mount")
def test_without_the_right_to_mount() -> None:
    """In a user namespace; where the kernel allows none, with an error that says so."""
    code = """
import os
from megascend.errors import PlatformError
from megascend.testing import faults
os.environ["TMPDIR"] = "/tmp"
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with faults.full_disk(65536) as disk:
        (disk / "fits").write_bytes(bytes(50000))
        try:
            (disk / "does not").write_bytes(bytes(50000))
        except OSError as error:
            print(error.strerror)
except PlatformError as error:
    assert "cannot mount on" in str(error) and "in a user namespace" in str(error)
    print("No space left on device")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "No space left on device\n", done.stderr
