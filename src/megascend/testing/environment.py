"""The environment of processes that compute a reference: plain torch on the CPU, whatever the caller runs on."""

from __future__ import annotations

import os
import sys


def reference_environment() -> dict[str, str]:
    """This process's environment and search path, without NPU (real or simulated) and with one thread."""
    from megascend.simnpu.environment import ACTIVE_VARIABLE, own_paths

    simulated = {str(path) for path in own_paths()} if ACTIVE_VARIABLE in os.environ else set()
    path = [entry for entry in sys.path if entry and entry not in simulated]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    environment.pop(ACTIVE_VARIABLE, None)
    return environment
