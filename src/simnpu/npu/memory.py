"""Memory figures: the bytes of the tensors alive on each device. Of an allocator's waste, and of what operators need
while they compute, they know nothing."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from simnpu import allocations
from simnpu.npu.devices import device_index

__all__ = [
    "empty_cache",
    "empty_virt_addr_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_empty_cache",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "ipc_collect",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]

Device = torch.device | str | int | None


def memory_allocated(device: Device = None) -> int:
    """Return the bytes of the tensors alive on the device."""
    return allocations.allocated(device_index(device))


def max_memory_allocated(device: Device = None) -> int:
    """Return the largest value of :func:`memory_allocated` since the last reset."""
    return allocations.peak(device_index(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    allocations.reset_peak(device_index(device))


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated
reset_max_memory_allocated = reset_peak_memory_stats
memory_cached, max_memory_cached, reset_max_memory_cached = (
    memory_reserved,
    max_memory_reserved,
    reset_peak_memory_stats,
)


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Check the device alone: no accumulated figures are kept."""
    device_index(device)


def memory_stats(device: Device = None) -> dict[str, int]:
    """Return the figures above under the names of PyTorch's caching allocator; others are not kept."""
    used, peak = memory_allocated(device), max_memory_allocated(device)
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        stats[f"{kind}.all.current"] = used
        stats[f"{kind}.all.peak"] = peak
    return stats


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """:func:`memory_stats` as a tree."""
    return nested(memory_stats(device))


def nested(stats: dict[str, int]) -> dict[str, Any]:
    """Nest ``a.b: 1`` as ``{a: {b: 1}}``."""
    tree: dict[str, Any] = {}
    for name, value in stats.items():
        *above, last = name.split(".")
        branch = tree
        for part in above:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def host_memory_stats() -> dict[str, int]:
    """Return nothing: pinned memory is not counted here."""
    return {}


host_memory_stats_as_nested_dict = host_memory_stats


def reset_accumulated_host_memory_stats() -> None:
    """Do nothing: no figures of pinned memory are kept."""


reset_peak_host_memory_stats = reset_accumulated_host_memory_stats


def get_allocator_backend() -> str:
    """Return ``native``: the name of torch_npu's own allocator, which nothing has replaced."""
    return "native"


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    used, peak = memory_allocated(device), max_memory_allocated(device)
    return f"simulated NPU: tensors hold {used / 2**20:.0f} MiB, {peak / 2**20:.0f} MiB at most"


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return available and total memory of the host, in bytes."""
    device_index(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def empty_cache() -> None:
    """Do nothing: memory goes back to the host's allocator when a tensor dies; nothing is cached here."""


host_empty_cache = empty_cache


empty_virt_addr_cache = empty_cache


def ipc_collect() -> None:
    """Do nothing: tensors of the simulated device cannot be shared with other processes."""


def _set_allocator_settings(settings: str) -> None:
    """Ignore the settings: the host's allocator is in use."""


class Share:
    """The part of the device's memory that the program has asked for."""

    fraction = 1.0


def get_per_process_memory_fraction(device: Device = None) -> float:
    device_index(device)
    return Share.fraction


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Store the fraction, without effect: there is no device memory to divide."""
    device_index(device)
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    Share.fraction = fraction
