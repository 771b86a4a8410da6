"""Waiting for other threads and processes, and the port they are given."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(
    condition: Callable[[], object], failure: str = "the condition did not hold", seconds: float = 120.0
) -> None:
    """Return when a condition holds; the time is a deadline, not a measurement."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, failure
        time.sleep(0.01)
