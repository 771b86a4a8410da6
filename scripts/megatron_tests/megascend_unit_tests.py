"""A plugin for pytest that lets Megatron-Core's own unit tests start without a GPU, and writes down how each one ended.

Their set-up takes the rank modulo the number of GPUs. On the CPU platform the number is 0, which is the truth; here, and only
here, it is the number of processes. A collective that a rank has left alone ends after half a minute instead of half an hour.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import megascend

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=30)
SKIPPED_FOR = "Skipped: "

if os.environ["MEGASCEND_RUN_PLATFORM"] == "cpu":
    megascend.bootstrap("cpu", engine="megatron-core")  # before the wrapping below
    torch.cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))


def _with_timeout(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = COLLECTIVE_TIMEOUT
        return original(*args, **kwargs)

    return function


torch.distributed.init_process_group = _with_timeout(torch.distributed.init_process_group)
torch.distributed.new_group = _with_timeout(torch.distributed.new_group)


def _note(**line: object) -> None:
    folder = os.environ.get("MEGASCEND_UNIT_RESULTS")
    if folder:
        with (Path(folder) / f"rank{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):  # of a test that was skipped: file, line, reason
        return str(report.longrepr[2]).removeprefix(SKIPPED_FOR)
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for a test's call, and for a set-up or teardown that did not pass."""
    if report.when == "call" or not report.passed:
        reason = "" if report.passed else _reason(report)
        _note(test=report.nodeid, when=report.when, outcome=report.outcome, reason=reason)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """One line for a file that could not be imported."""
    if report.failed:
        _note(test=report.nodeid, when="collect", outcome="failed", reason=_reason(report))
