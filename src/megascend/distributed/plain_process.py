"""The environment of a helper process: plain packages on the CPU, one thread, alone, whatever its parent runs on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megascend.distributed.launch import child_environment


def plain_environment() -> dict[str, str]:
    """This process's environment and search path, without what makes torch load an accelerator, and as a world of one."""
    from simnpu.environment import own_paths
    from simnpu.settings import ACTIVE_VARIABLE

    simulated = {str(path) for path in own_paths()} if ACTIVE_VARIABLE in os.environ else set()
    path = [str(Path(entry).absolute()) for entry in sys.path if entry and entry not in simulated]
    environment = child_environment()
    environment.pop(ACTIVE_VARIABLE, None)
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
