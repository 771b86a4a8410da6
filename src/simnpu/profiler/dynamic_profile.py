"""``torch_npu.profiler.dynamic_profile``: profiling switched on by a file while a job runs. Not simulated, says so once."""

from __future__ import annotations

import functools
import sys
from typing import Any

__all__ = ["init", "set_state", "start", "step"]


@functools.cache
def warn() -> None:
    print(
        "torch_npu.profiler.dynamic_profile: the simulated device does not watch the configuration file and records "
        "nothing; use torch_npu.profiler.profile",
        file=sys.stderr,
    )


def init(path: str) -> None:
    warn()


def start(config_path: str | None = None) -> None:
    warn()


def step() -> None:
    """Do nothing: nothing is recorded."""


def set_state(state_step: dict[str, Any]) -> None:
    """Do nothing: nothing is recorded."""
