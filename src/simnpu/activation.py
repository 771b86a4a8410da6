"""Switching the simulated device on in the running process."""

from __future__ import annotations

import os
import sys

from simnpu.environment import (
    ASCEND_HOME,
    TOOLKIT_VARIABLES,
    own_paths,
    refuse_beside_real_torch_npu,
    search_path,
    with_programs,
)
from simnpu.errors import ImportOrderError
from simnpu.settings import ACTIVE_VARIABLE

MUST_COME_LATER = ("megatron", "mindspeed", "mcore_bridge")
MARK = "__simulated_by__"  # attribute of our torch_npu


def is_active() -> bool:
    """Check whether the simulated device is loaded in this process."""
    return hasattr(sys.modules.get("torch_npu"), MARK)


def activate() -> None:
    """Make ``torch.device("npu")``, ``hccl`` and ``import torch_npu`` the simulated ones. Idempotent.

    Child processes inherit the variables but not ``sys.path``: give them :func:`simnpu.environment`.
    """
    if is_active():
        return
    if early := sorted(name for name in ("torch_npu", *MUST_COME_LATER) if name in sys.modules):
        raise ImportOrderError(
            f"simnpu.activate() must come before {', '.join(early)} (already imported): call it first, or "
            "start the program with `python -m simnpu -- ...`"
        )
    refuse_beside_real_torch_npu(search_path())
    for path in reversed([*map(str, own_paths())]):
        if path not in sys.path:
            sys.path.insert(0, path)
    for variable in TOOLKIT_VARIABLES:
        os.environ.setdefault(variable, str(ASCEND_HOME))
    os.environ.update(with_programs(os.environ))
    import torch_npu  # noqa: F401  # ours: the folder in front of sys.path

    os.environ[ACTIVE_VARIABLE] = "1"  # after the import, which is silent where the variable says a parent has spoken
