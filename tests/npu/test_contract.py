"""The double of MindSpeed and the real one agree on everything that megascend's bootstrap relies on.

``contract_report.py`` writes the reports, one process per scenario. The other tests of this folder run on the double, so that a
MindSpeed release that changes the interface fails here, by name, before anything trains. MEGASCEND_MINDSPEED names the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simnpu
from support.ascend_packages import DOUBLES

REPORT = Path(__file__).with_name("contract_report.py")
SCENARIOS = ("patched", "ring", "late")
DEADLINE_S = 300
CHECKOUT = os.environ.get("MEGASCEND_MINDSPEED")

pytestmark = [] if CHECKOUT else [pytest.mark.nightly]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process on the simulated device with the ``mindspeed`` of ``folder``."""
    path = [str(folder), *(entry for entry in sys.path if entry and "simnpu" not in entry and "doubles" not in entry)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MIND_SPEED_LOG_LEVEL": "INFO"}
    return simnpu.environment(os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path)})


def make_reports(folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(REPORT)]
    processes = {
        scenario: subprocess.Popen(
            [*command, scenario],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for scenario in SCENARIOS
    }
    reports = {}
    try:
        for scenario, process in processes.items():
            output, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"scenario {scenario} with {folder}:\n{errors[-4000:]}"
            reports[scenario] = json.loads(output.splitlines()[-1])
    finally:
        for process in processes.values():
            process.kill()
    return reports


def test_double_agrees_with_the_real_mindspeed():
    double = dict(flatten(make_reports(DOUBLES)))
    if CHECKOUT is None:
        pytest.skip("MEGASCEND_MINDSPEED names no checkout of MindSpeed")
    real = dict(flatten(make_reports(Path(CHECKOUT))))
    lacking = [name for name in real if name not in double]
    # The double declares the arguments that matter, not all.
    assert [name for name in lacking if not name.startswith("patched.arguments.defaults")] == []
    different = {name: (value, real.get(name, "absent")) for name, value in double.items() if real.get(name) != value}
    assert different == {}


def flatten(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return ``a.b.c`` and the value for every leaf of nested dicts."""
    if not isinstance(value, dict) or not value:
        return [(name, value)]
    return [leaf for key, inner in value.items() for leaf in flatten(inner, f"{name}.{key}" if name else key)]
