"""Run a line in its own process with a deadline, and end all its descendants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.runner import environment

GRACE_S = 15.0
"""Seconds from SIGTERM, at which launchers end their ranks, to SIGKILL."""


@dataclass(frozen=True)
class Outcome:
    """Result of a line: the figures that it wrote, or None and a ``problem``."""

    seconds: float
    figures: dict[str, Any] | None
    problem: str = ""


def run(command: Sequence[str], result: Path, log: Path, deadline_s: float) -> Outcome:
    """Run ``COMMAND --json RESULT``; what it prints goes to ``log``."""
    result.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--json", str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.monotonic() - start
    if code is None:
        return Outcome(seconds, None, f"not done after its deadline of {deadline_s:.0f} s{_last_lines(log)}")
    if code != 0:
        return Outcome(seconds, None, f"exit code {code}{_last_lines(log)}")
    try:
        return Outcome(seconds, json.loads(result.read_text()))
    except (OSError, ValueError) as error:
        return Outcome(seconds, None, f"exit code 0, but no figures: {error}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group; it may outlive its leader."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        if process.returncode is None:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def _last_lines(log: Path, count: int = 12) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-count:]
    return "".join(f"\n    {line[:300]}" for line in lines)
