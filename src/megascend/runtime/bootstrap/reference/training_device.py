"""``megatron.training`` on a CPU: its start-up requires a GPU, though all that follows runs on the CPU.

Only the modules below see a device: their global ``torch`` is replaced by one whose ``cuda`` has one GPU. All other code gets the
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
# Megatron refuses grouped matrix products below 8, and requires CUDA_DEVICE_MAX_CONNECTIONS=1 below 10.
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
    """``torch`` with :class:`_Cuda` as ``cuda``."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(name: str) -> list[str]:
    """Make module ``name``, one of ``MODULES``, see a device. Idempotent; call after its import."""
    if name not in sys.modules:
        raise ImportOrderError(f"import {name} first")
    module: Any = sys.modules[name]
    if not isinstance(module.torch, _Torch):
        patch(module, "torch", _Torch(), "sees one GPU, which is the CPU")
    return []


def without_fused_kernels() -> list[str]:
    """Skip the compilation of CUDA kernels at the start; Megatron-Core checks for them before use. Idempotent."""
    kernels: Any = sys.modules[FUSED_KERNELS]
    if not hasattr(kernels.load, "__megascend__"):

        def load(args: Any) -> None: ...

        load.__megascend__ = True  # type: ignore[attr-defined]
        patch(kernels, "load", load, "compiles nothing for CUDA")
    return []
