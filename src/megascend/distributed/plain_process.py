"""The environment of a helper process: plain packages on the CPU, one thread, alone, whatever its parent runs on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCHERS_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MEGASCEND_STORE",
)


def plain_environment() -> dict[str, str]:
    """This process's environment and search path, without what makes torch load an accelerator, and as a world of one."""
    from simnpu.environment import own_paths
    from simnpu.settings import ACTIVE_VARIABLE

    simulated = {str(path) for path in own_paths()} if ACTIVE_VARIABLE in os.environ else set()
    path = [str(Path(entry).absolute()) for entry in sys.path if entry and entry not in simulated]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (ACTIVE_VARIABLE, *LAUNCHERS_VARIABLES) and not name.startswith("TORCHELASTIC_")
    }
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
