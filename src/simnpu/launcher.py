"""Starting a program on the simulated device, and saying in a line what that device is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from simnpu import identity
from simnpu.environment import environment
from simnpu.errors import ConfigError, PlatformError

PROBE_S = 300.0
PROBE = """
import torch, torch_npu
import torch.distributed as dist
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
total = torch.ones(2, device="npu") + 1
dist.all_reduce(total)
assert total.tolist() == [2.0, 2.0], total
dist.destroy_process_group()
npu = torch.npu
print(f"torch_npu {torch_npu.__version__}, {npu.device_count()} x {npu.get_device_name()}; an operator and an all-reduce work")
"""


def prepared() -> dict[str, str]:
    """Return the environment of this process with the simulated device in it, after a look at its settings."""
    identity.chip()  # torch would say of a wrong setting that a backend failed to load
    identity.device_count()
    return environment()


def launch(command: Sequence[str]) -> NoReturn:
    """Become ``command``, with the simulated device in front of it; its exit code is this process's."""
    env = prepared()
    try:
        os.execvpe(command[0], list(command), env)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error


def describe() -> str:
    """Describe this interpreter's simulated device in one line, after an operator and a collective have run on it."""
    identity.chip()
    identity.device_count()
    settings = {
        name: value for name, value in environment().items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=settings,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"an operator and a collective on the simulated device did not end in {PROBE_S:.0f} s"
        ) from None
    if probe.returncode != 0:
        message = (probe.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PlatformError(f"the simulated device does not work here (exit code {probe.returncode}): {message}")
    return probe.stdout.strip()
