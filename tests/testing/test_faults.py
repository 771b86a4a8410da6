"""Injected faults: arming and firing, damaged files, and full or read-only disks."""

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

from megascend.errors import ConfigError, PlatformError
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.testing import Lost, faults, run_distributed
from megascend.testing.faults import Fault


def armed(*armed_faults: Fault, rank: int = 0, attempt: int = 0) -> HangMonitor:
    with faults.inject(*armed_faults):
        return HangMonitor(rank, 1, 10.0, attempt=attempt)


def test_fault_fires_once_at_its_phase_and_step(caplog: pytest.LogCaptureFixture) -> None:
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
        repeated = HangMonitor(0, 1, 10.0)  # created again in the same process
        repeated.step = 2
        with repeated.phase("update"):
            pass
    assert faults.VARIABLE not in os.environ


def test_rank_and_attempt_select_their_faults() -> None:
    faults_ = [Fault("raise", 1, "update"), Fault("skip", 1, "grad reduce"), Fault("raise", 1, "update", attempt=1)]
    assert armed(*faults_, rank=0)._faults is None
    monitor = armed(*faults_, rank=1)
    ran = []
    monitor.call("grad reduce", ran.append, 1)
    monitor.call("grad reduce", ran.append, 2)
    assert ran == [2]
    with pytest.raises(RuntimeError, match="injected fault"):
        monitor.call("update", ran.append, 3)
    assert str(armed(*faults_, rank=1, attempt=1)._faults) == "raise in update on rank 1"


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
def test_invalid_variable_raises_config_error(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        HangMonitor(0, 1, 10.0)
    assert message in str(caught.value)


def test_without_faults_the_module_is_not_imported() -> None:
    code = """
import sys
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
HangMonitor(0, 1, 1.0)
print("megascend.testing.faults" in sys.modules)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert completed.stdout == "False\n"


def wait_until_lost(note: Path, action: faults.Action) -> None:
    """Wait until the process whose id is in ``note`` has ended or stopped, or for a hang until it has started."""
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
def test_lost_ranks_are_reported_as_results(action: faults.Action, status: int | None, tmp_path: Path) -> None:
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


def test_full_disk_raises_enospc() -> None:
    try:
        with faults.full_disk(64 * 1024) as disk:
            (disk / "fits").write_bytes(bytes(60 * 1024))
            with pytest.raises(OSError, match="No space left") as caught:
                (disk / "does not").write_bytes(bytes(60 * 1024))
            assert caught.value.errno == errno.ENOSPC
    except PlatformError as error:
        pytest.skip(str(error))
    assert not disk.exists()


def test_read_only_directory_raises_erofs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    try:
        with faults.read_only(tmp_path) as read_only:
            assert (read_only / "file").read_text() == "x"
            with pytest.raises(OSError, match="Read-only") as caught:
                (read_only / "file").write_text("y")
            assert caught.value.errno == errno.EROFS
    except PlatformError as error:
        pytest.skip(str(error))
    (tmp_path / "file").write_text("z")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop the privilege to mount")
def test_full_disk_without_mount_privilege() -> None:
    """Mount in a user namespace, or raise an error that names it if the kernel allows none."""
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
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert completed.stdout == "No space left on device\n", completed.stderr
