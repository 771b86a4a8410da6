"""Section ``doctor``: ``megascend doctor``, check by check."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from megascend.runtime.distributed.launch import child_environment
from npu_acceptance.plan import Settings
from npu_acceptance.records import Measurement, Results, Verdict, failed

VERDICTS: dict[str, Verdict] = {"ok": "ok", "warn": "noted", "skip": "left out", "fail": "failed"}


def run(settings: Settings, results: Results) -> None:
    """Record one measurement for each check."""
    command = [sys.executable, "-m", "megascend.apps.cli.main", "doctor", "--json"]
    completed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=child_environment(),
        encoding="utf-8",
        errors="replace",
    )
    try:
        checks = json.loads(completed.stdout)["checks"]
    except (json.JSONDecodeError, KeyError):
        print(completed.stdout + completed.stderr)
        results.add(failed("megascend doctor", f"no report, exit code {completed.returncode}"))
        return
    results.extend(as_measurement(check) for check in checks)


def as_measurement(check: dict[str, Any]) -> Measurement:
    """Convert a check of ``megascend doctor`` to a measurement."""
    return Measurement(check["name"], VERDICTS[check["status"]], check["found"], note=check["hint"])
