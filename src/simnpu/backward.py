"""Backward passes on several devices.

PyTorch's engine has a thread for each device that the device guard counts, and the guard of a device written in Python
counts one. Once a process has used another device than ``npu:0``, backward passes therefore run in the thread that calls
them; before, on the engine's thread, as on hardware.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

from simnpu.visible import only_the_first_is_used


class Engine(torch._C._ImperativeEngine):
    """PyTorch's engine, which everybody reaches as ``Variable._execution_engine`` (Megatron-Core directly)."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if only_the_first_is_used():
            return super().run_backward(*args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return super().run_backward(*args, **kwargs)


def install() -> None:
    """Put it in the place of PyTorch's."""
    Variable._execution_engine = Engine()
