"""The plain CPU: gloo, the reference Transformer Engine, and torch.cuda names redirected."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from megascend.platforms.base import MemoryFigures, Platform

if TYPE_CHECKING:
    from megascend.bootstrap.versions import Stack
    from megascend.config import Parallel


class CpuPlatform(Platform):
    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    must_patch_first: ClassVar[bool] = True

    def unavailable_because(self) -> str | None:
        return None

    def prepare(self, stack: Stack, parallel: Parallel) -> list[str]:
        changes = self._threads()
        # Must be set before torch is imported for the first time to spare the dynamo import; harmless afterwards.
        if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
            changes.append("TORCHDYNAMO_DISABLE=1")
        from megascend import reference_te
        from megascend.platforms import cuda_redirect

        return changes + reference_te.install() + cuda_redirect.install()

    def finish(self) -> list[str]:
        from megascend.platforms import cuda_redirect, gloo_uneven

        return cuda_redirect.patch_moe_device_checks() + gloo_uneven.install()

    def device(self, local_rank: int):
        import torch

        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryFigures:
        import resource

        import psutil

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryFigures(psutil.Process().memory_info().rss, peak, psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        """The kernel keeps the peak of a process's whole life; it cannot be reset."""

    def _threads(self) -> list[str]:
        """Processes that share cores and each start a thread per core slow each other down tenfold."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "OMP_NUM_THREADS" in os.environ:
            return []
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch

        torch.set_num_threads(1)
        return ["OMP_NUM_THREADS=1, torch.set_num_threads(1)"]
