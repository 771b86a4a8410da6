"""CPU platform for verl (``VERL_PLATFORM=cpu``): verl supports CUDA, ROCm and NPUs only."""

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
"""Backend string that verl builds from Gloo for the host and the platform's backend; torch refuses the repeated device."""


def register() -> None:
    """Register the platform with verl, and patch torch to accept verl's backend string for it."""
    PlatformRegistry.register(platform="cpu")(VerlCpuPlatform)
    # Read now, so that the patch calls the function that is installed at registration.
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        # The same meaning: tensors on the CPU, over Gloo.
        return init("gloo" if backend == REPEATED else backend, *args, **kwargs)

    patch(dist, "init_process_group", init_process_group, f"takes verl's {REPEATED!r} for 'gloo'")


class _CpuModule(ModuleType):
    """``torch.cpu`` with the rest of verl's device module interface. Memory is the process's: there is no allocator to query."""

    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not defined here.
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the process's peak memory in bytes."""
        # Linux reports kibibytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return free and total memory of the host in bytes."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"


class VerlCpuPlatform(PlatformBase):
    """Platform of ranks on this host's CPUs, with Gloo."""

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
        return "cpu"  # verl passes it to Tensor.to, which reads an index as a GPU

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
        return "MEGASCEND_VISIBLE_CPUS"  # never set; verl requires a name

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """Return Ray's GPU resource, the only one that verl counts; on a CPU its number is configured as that of ranks."""
        return "GPU"

    # Variables that keep Ray from hiding accelerators from its workers; a CPU is not hidden.
    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
