"""The CPU platform: plain CPU with Gloo."""

from __future__ import annotations

import os
from typing import ClassVar

from megascend.runtime.platforms.base import MemoryFigures, Platform
from megascend.runtime.platforms.cpu_products import avoid_broken_amx


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    reports_peak_memory: ClassVar[bool] = False

    def unavailable_because(self) -> str | None:
        return None

    def prepare(self) -> list[str]:
        """Avoid broken AMX, and limit each of several processes to one thread."""
        changes = avoid_broken_amx(os.environ)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "OMP_NUM_THREADS" in os.environ:
            return changes
        # Processes that share cores and each start a thread per core slow each other down tenfold.
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch

        torch.set_num_threads(1)
        return [*changes, "OMP_NUM_THREADS=1, torch.set_num_threads(1)"]

    def device(self, local_rank: int):
        import torch

        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryFigures:
        import resource

        import psutil

        # ru_maxrss is in kibibytes on Linux.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryFigures(psutil.Process().memory_info().rss, peak, psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        """Do nothing: the kernel reports the peak since the start of the process, which cannot be reset."""
