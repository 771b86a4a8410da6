"""Detect broken AMX: bf16 products on x86 processors of virtual machines that advertise AMX but cannot run it.

Observed on a virtual machine (Xeon; Linux 6.18 under Firecracker): CPUID and the kernel both report AMX, so oneDNN uses it for
bf16, and the process ends with SIGILL or an error ``could not create a primitive``, depending on the shape. No flag
distinguishes such a machine, so products are tried in a child process, once for a machine and a version of torch.
"""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

from megascend.errors import PlatformError
from megascend.runtime.distributed.launch import child_environment
from megascend.runtime.io import paths, shared
from megascend.runtime.io.hashing import cache_key

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""The highest instruction set of oneDNN below AMX."""
CPUINFO = Path("/proc/cpuinfo")
TIMEOUT_S = 300.0

TRIAL = """
import torch
torch.manual_seed(0)
for n in (33, 64, 257):
    a, b = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    error = ((a @ b).float() - a.float() @ b.float()).abs().max().item()
    if not error < 0.02 * n:
        raise ArithmeticError(f"a product of {n} x {n} bf16 values is off by {error}")
"""
"""Rounding to bf16 causes an error of about 0.005 n; NaN fails the comparison too."""


def avoid_broken_amx(environment: MutableMapping[str, str], cpuinfo: Path = CPUINFO) -> list[str]:
    """Disable AMX in oneDNN if it does not work, unless :data:`VARIABLE` is set; return a line for each change.

    Call it before this process's first product of bf16 matrices: oneDNN reads the variable once.
    """
    if VARIABLE in environment or not shows_amx(cpuinfo):
        return []
    path = paths.cache_folder() / "cpu-products" / f"{_key(cpuinfo)}.json"
    with_amx, without_amx = _cached_trials(path, environment)
    if not with_amx:
        return []
    if without_amx:
        raise PlatformError(
            f"products of bf16 matrices fail on this processor, with AMX ({with_amx}) and without ({without_amx})"
        )
    environment[VARIABLE] = WITHOUT_AMX
    return [f"{VARIABLE}={WITHOUT_AMX}: this machine reports AMX, but bf16 products with it fail ({with_amx})"]


def shows_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Check whether the kernel lists AMX among the processor's features."""
    try:
        return "amx_tile" in _flags(cpuinfo)
    except OSError:  # not Linux
        return False


def _flags(cpuinfo: Path) -> list[str]:
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


def _cached_trials(path: Path, environment: MutableMapping[str, str]) -> tuple[str, str]:
    """Return :func:`_trials`, run once for all processes that share the file ``path``."""
    try:
        shared.cached(path, lambda fresh: fresh.write_text(json.dumps(_trials(environment)), encoding="utf-8"))
        with_amx, without_amx = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:  # includes TimeoutError
        logging.getLogger(__name__).warning(
            "the result of a bf16 trial could not be stored in %s (%s): each start repeats it; set MEGASCEND_CACHE to another "
            "folder",
            path.parent,
            error,
        )
        return _trials(environment)
    return with_amx, without_amx


def _trials(environment: MutableMapping[str, str]) -> tuple[str, str]:
    """Return the failure with AMX and, only in that case, the failure without AMX; empty if the trial passed."""
    first = _trial(environment)
    return first, _trial({**environment, VARIABLE: WITHOUT_AMX}) if first else ""


def _trial(environment: MutableMapping[str, str]) -> str:
    try:
        completed = subprocess.run(
            [sys.executable, "-c", TRIAL],
            env=child_environment(environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"a trial of bf16 products did not end within {TIMEOUT_S:.0f} s") from None
    if completed.returncode == 0:
        return ""
    # In a process of its own, since an illegal instruction would end this one.
    if completed.returncode < 0:
        return f"signal {-completed.returncode}"
    return (completed.stderr.strip().splitlines() or ["no message"])[-1]


def _key(cpuinfo: Path) -> str:
    # The inputs of the result; several hosts may share the folder of the cache.
    decisive = [sorted(_flags(cpuinfo)), platform.release(), platform.node(), metadata.version("torch"), TRIAL]
    return cache_key(decisive)
