"""Injected faults: arming and firing, damaged files, and full or read-only disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megascend.errors import ConfigError, PlatformError
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.testing import faults
from megascend.testing.faults import Fault
from support.forked_programs import run_forked


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
    completed = run_forked(code)
    assert completed.stdout == "False\n", completed.stderr


# --- files ---


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
