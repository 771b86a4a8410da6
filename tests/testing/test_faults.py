"""Injected faults: arming and firing, damaged files, and full or read-only disks."""

from __future__ import annotations

import os

import pytest

from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.testing import faults
from megascend.testing.faults import Fault
from support.forked_programs import run_forked


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


def test_without_faults_the_module_is_not_imported() -> None:
    code = """
import sys
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
HangMonitor(0, 1, 1.0)
print("megascend.testing.faults" in sys.modules)
"""
    completed = run_forked(code)
    assert completed.stdout == "False\n", completed.stderr
