"""NVIDIA GPUs, and NCCL."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import MutableMapping
from typing import ClassVar

from megascend.errors import PlatformError
from megascend.platforms.base import MemoryFigures, Platform

# Dense bf16 peak in FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40": 181e12,
}


class CudaPlatform(Platform):
    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "nccl"
    bind_device: ClassVar[bool] = True
    page_locks_memory: ClassVar[bool] = True
    fuses_activations: bool = True

    def unavailable_because(self) -> str | None:
        import torch

        return None if torch.cuda.is_available() else "torch.cuda.is_available() is False"

    def configure_products(self, tf32: bool) -> list[str]:
        from megascend.platforms import cuda_products

        return cuda_products.configure(tf32, os.environ)

    def check_products(self) -> None:
        if self.has_transformer_engine_kernels:
            from megascend.platforms import cuda_products

            cuda_products.check(cuda_products.relative_error())

    def limit_collectives(self, timeout_s: float) -> list[str]:
        return shorten_dump(os.environ)

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def device(self, local_rank: int):
        import torch

        count = torch.cuda.device_count()
        if local_rank >= count:
            raise PlatformError(f"local rank {local_rank} has no GPU of its own: this host shows {count}")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def start_ahead(self, local_rank: int) -> None:
        # No daemon: a process that ends within a second waits for it, since CUDA cannot be left while it starts.
        threading.Thread(target=first_products, args=(local_rank,), name="megascend-cuda-start").start()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def memory(self) -> MemoryFigures:
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return MemoryFigures(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total)

    def reset_peak_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def room(self) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()

    def free_cached_memory(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def pci_address(self, local_rank: int) -> str | None:
        import torch

        if local_rank >= torch.cuda.device_count():
            return None  # :meth:`device` says so
        properties = torch.cuda.get_device_properties(local_rank)
        numbers = [
            getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
        ]  # torch 2.6 tells none
        return None if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)

    def peak_flops(self) -> float | None:
        import torch

        name = torch.cuda.get_device_name()
        return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def shorten_dump(environment: MutableMapping[str, str]) -> list[str]:
    """How long torch leaves ranks hanging after a collective of NCCL's has timed out, to dump its flight recorder.

    It is four times the variable, whose default is 15 s (``ProcessGroupNCCL.cpp``): on an H200 the process ended a minute
    after the timeout. A variable that is set is respected.
    """
    name, milliseconds = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 2000
    if name in environment:
        return []
    environment[name] = str(milliseconds)
    return [f"{name}={milliseconds}"]


def first_products(local_rank: int) -> None:
    """Compute a little on a device: its context and cuBLAS are there then. Most of it is done without Python's lock."""
    import torch

    with contextlib.suppress(RuntimeError):  # told where the device is needed
        if local_rank >= torch.cuda.device_count():
            return
        for dtype in (torch.bfloat16, torch.float32):
            ones = torch.ones(16, 16, dtype=dtype, device=torch.device("cuda", local_rank))
            torch.mm(ones, ones)
        torch.cuda.synchronize(local_rank)
