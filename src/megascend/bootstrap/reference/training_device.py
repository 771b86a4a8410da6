"""``megatron.training`` on a CPU: its start-up asks for a GPU and ends without one, though what it then does runs here.

Only the modules below see a device: their global ``torch`` is replaced by one whose ``cuda`` has one GPU. Everybody else gets the
truth from ``torch.cuda.is_available()`` and ``device_count()``.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from megascend.changes import patch
from megascend.errors import ImportOrderError

MODULES = tuple(f"megatron.training.{name}" for name in ("initialize", "arguments", "yaml_arguments", "utils"))
FUSED_KERNELS = "megatron.legacy.fused_kernels"
# At least 8, or grouped matrix products are refused; below 10 it asks for CUDA_DEVICE_MAX_CONNECTIONS=1.
CAPABILITY = (10, 0)


class _Cuda:
    """``torch.cuda`` with one device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="cpu", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch:
    """``torch`` with that ``cuda``."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(name: str) -> list[str]:
    """Show a device to module ``name``, which is one of ``MODULES``. Idempotent; call after its import."""
    if name not in sys.modules:
        raise ImportOrderError(f"import {name} first")
    module: Any = sys.modules[name]
    if not isinstance(module.torch, _Torch):
        patch(module, "torch", _Torch(), "sees one GPU, which is the CPU")
    return []


def without_fused_kernels() -> list[str]:
    """Have nothing compiled for CUDA at the start; Megatron-Core looks for those kernels before it uses one. Idempotent."""
    kernels: Any = sys.modules[FUSED_KERNELS]
    if not hasattr(kernels.load, "__megascend__"):

        def load(args: Any) -> None: ...

        load.__megascend__ = True  # type: ignore[attr-defined]
        patch(kernels, "load", load, "compiles nothing for CUDA")
    return []
