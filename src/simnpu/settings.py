"""The environment variables that set the simulated device up. They are read here and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

ACTIVE_VARIABLE = "SIMNPU"  # 1 in every process that the simulated device was put in front of
DEVICES_VARIABLE = "SIMNPU_DEVICES"
OBJECTS_VARIABLE = "SIMNPU_OBJECTS"
LOG_VARIABLE = "SIMNPU_LOG"
NAME_VARIABLE = "SIMNPU_DEVICE_NAME"  # a chip's name, e.g. Ascend910B3, for programs that ask for one
PYTHON_VARIABLE = "SIMNPU_PYTHON"  # the interpreter that `npu-smi` runs on

FORMER_NAMES = {
    f"MEGASCEND_{name}": name
    for name in (ACTIVE_VARIABLE, DEVICES_VARIABLE, OBJECTS_VARIABLE, LOG_VARIABLE, NAME_VARIABLE, PYTHON_VARIABLE)
}
"""Names of version 0.1, each with the one that took its place. They are still read, with a line on stderr."""

_formerly = {name: former for former, name in FORMER_NAMES.items()}
_warned: set[str] = set()


def read(name: str) -> str | None:
    """The value of the variable ``name``, or else of its former name; None if neither is set."""
    found = os.environ.get(name)
    if found is None and (found := os.environ.get(_formerly[name])) is not None:
        _warn(_formerly[name], name)
    return found


def under_present_names(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with former names replaced by present ones, of which a value that is set already stays."""
    renamed = {name: value for name, value in env.items() if name not in FORMER_NAMES}
    for former, name in FORMER_NAMES.items():
        if former in env:
            _warn(former, name)
            renamed.setdefault(name, env[former])
    return renamed


def _warn(former: str, name: str) -> None:
    if former not in _warned:
        _warned.add(former)
        print(f"simnpu: {former} is now called {name}; set {name}, since the former name will go", file=sys.stderr)
