"""bf16 products on x86 processors that show AMX, where a virtual machine may not run what it shows.

Seen on a virtual machine (Xeon; Linux 6.18 under Firecracker): CPUID and the kernel both offer AMX, so oneDNN takes it for bf16,
and the process ends with SIGILL or an error ``could not create a primitive``, depending on the shape. No flag tells such a
machine from a sound one, so products are tried in a process of its own, once for a machine and a version of torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import subprocess
import sys
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

from megascend.distributed.launch import child_environment
from megascend.errors import PlatformError
from megascend.io import paths, shared

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""The highest of oneDNN's instruction sets below AMX."""
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
"""Rounding to bf16 makes an error of about 0.005 n; not a number fails the comparison too."""


def avoid_broken_amx(environment: MutableMapping[str, str], cpuinfo: Path = CPUINFO) -> list[str]:
    """Keep oneDNN from AMX where it does not work, unless :data:`VARIABLE` is set; return a line for each change.

    Call it before this process's first product of bf16 matrices.
    """
    if VARIABLE in environment or not shows_amx(cpuinfo):
        return []
    place = paths.cache_folder() / "cpu-products" / f"{_key(cpuinfo)}.json"
    with_amx, without = _kept_trials(place, environment)
    if not with_amx:
        return []
    if without:
        raise PlatformError(
            f"products of bf16 matrices fail on this processor, with AMX ({with_amx}) and without ({without})"
        )
    environment[VARIABLE] = WITHOUT_AMX
    return [f"{VARIABLE}={WITHOUT_AMX}: this machine shows AMX, with which bf16 products fail ({with_amx})"]


def shows_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the kernel lists AMX among the processor's features."""
    try:
        return "amx_tile" in _flags(cpuinfo)
    except OSError:  # no Linux
        return False


def _flags(cpuinfo: Path) -> list[str]:
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


def _kept_trials(place: Path, environment: MutableMapping[str, str]) -> tuple[str, str]:
    """:func:`_trials`, once for all processes that share ``place``."""
    try:
        shared.cached(place, lambda fresh: fresh.write_text(json.dumps(_trials(environment)), encoding="utf-8"))
        with_amx, without = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:  # TimeoutError among them
        logging.getLogger(__name__).warning(
            "a trial of bf16 products could not be kept in %s (%s): each start repeats it; MEGASCEND_CACHE names another folder",
            place.parent,
            error,
        )
        return _trials(environment)
    return with_amx, without


def _trials(environment: MutableMapping[str, str]) -> tuple[str, str]:
    """What went wrong with AMX, and if anything did, without; empty where nothing did."""
    first = _trial(environment)
    return first, _trial({**environment, VARIABLE: WITHOUT_AMX}) if first else ""


def _trial(environment: MutableMapping[str, str]) -> str:
    command = [sys.executable, "-c", TRIAL]
    try:
        done = subprocess.run(
            command,
            env=child_environment(environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"a trial of bf16 products has not ended within {TIMEOUT_S:.0f} s") from None
    if done.returncode == 0:
        return ""
    return (
        f"signal {-done.returncode}"
        if done.returncode < 0
        else (done.stderr.strip().splitlines() or ["no message"])[-1]
    )


def _key(cpuinfo: Path) -> str:
    decisive = [sorted(_flags(cpuinfo)), platform.release(), platform.node(), metadata.version("torch"), TRIAL]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]
