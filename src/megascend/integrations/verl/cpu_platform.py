"""A CPU as verl's platform, under ``VERL_PLATFORM=cpu``: verl has CUDA, ROCm and NPUs only."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

from megascend.changes import patch

REPEATED = "cpu:gloo,cpu:gloo"
"""What verl asks torch for: Gloo on the host, and the platform's backend on its device. torch refuses the repetition."""


def register() -> None:
    """Make the platform known to verl, and have torch take what verl asks for with it."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init("gloo" if backend == REPEATED else backend, *args, **kwargs)

    patch(dist, "init_process_group", init_process_group, f"takes verl's {REPEATED!r} for 'gloo'")


class _CpuModule(ModuleType):
    """``torch.cpu`` with what verl asks of a device module. Memory is the process's: there is no allocator to ask."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def max_memory_allocated(self, device: Any = None) -> int:
        """Most memory that the process has had, in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and all memory of the host, in bytes."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"


class CpuPlatform(PlatformBase):
    """Ranks are processes on this host's CPUs, and meet over Gloo."""

    _module = _CpuModule("cpu")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl hands it to Tensor.to, for which an index would be a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "MEGASCEND_VISIBLE_CPUS"  # nobody sets it

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """A GPU, for Ray: verl counts no other devices in a cluster. On a CPU it is told how many ranks there may be."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
