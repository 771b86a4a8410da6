"""The interface of a platform. One file per platform in this package; all other code is independent of the hardware."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory of this process, in bytes. Zero where the platform cannot measure it."""

    allocated: int
    peak: int
    total: int


class Platform(ABC):
    """A kind of device: its set-up, communication and measurements. Independent of engines and providers.

    Attributes:
        name: value of the setting ``platform``.
        device_type: the ``torch.device`` type of tensors.
        backend: the ``torch.distributed`` backend of collectives on device tensors.
        bind_device: True if ``init_process_group`` of several ranks gets the device (eager communicators; NCCL only).
        has_transformer_engine_kernels: True if the bootstrap activated the real Transformer Engine: fused rotary
            embedding, matrix products that add to Megatron's fp32 gradient buffers.
        implicit_causal_masks: True if the attention kernel does not accept a dense causal mask.
        attention_draws_its_own_dropout: True if the fused attention draws dropout masks itself and ignores eval() and
            Megatron's random streams.
        packed_lengths_on_host: True if attention reads the ends of packed samples on the CPU; with a device tensor each
            layer would synchronize with the device.
        page_locks_memory: True if copies into page-locked host memory are faster (and known to work here).
        reports_peak_memory: True if :meth:`memory` reports the peak since :meth:`reset_peak_memory`.
        fuses_activations: True if torch.compile can fuse Megatron's gated activations.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    backend: ClassVar[str]
    bind_device: ClassVar[bool] = False
    implicit_causal_masks: ClassVar[bool] = False
    attention_draws_its_own_dropout: ClassVar[bool] = False
    packed_lengths_on_host: ClassVar[bool] = False
    page_locks_memory: ClassVar[bool] = False
    reports_peak_memory: ClassVar[bool] = True
    has_transformer_engine_kernels: bool = False
    fuses_activations: bool = False

    @abstractmethod
    def unavailable_because(self) -> str | None:
        """Return why this platform cannot be used here, or None. Imports torch, changes nothing."""

    def prepare(self) -> list[str]:
        """Prepare the process for this device, independent of the engine; return one line for every change."""
        return []

    def configure_products(self, tf32: bool) -> list[str]:
        """Set the precision of fp32 matrix products, before the first one; return one line for every change."""
        if tf32:
            raise ConfigError(
                f"tf32=True, but platform {self.name!r} has no TF32: its fp32 products are fp32; set tf32=False"
            )
        return []

    def check_products(self) -> None:
        """Raise PlatformError unless products of fp32 matrices are fp32. Called if precision fp32 is configured."""
        return

    # Before the groups: NCCL and HCCL read their environment variables when a communicator is created.
    def limit_collectives(self, timeout_s: float) -> list[str]:
        """Set the run's timeout in the libraries below torch, before groups are created; return one line for every change."""
        return []

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Select and return the device of this process."""

    def warm_up(self, local_rank: int) -> None:
        """Warm up this process's device on a thread, so that its first use waits less; has no other effect."""
        return

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Return the device memory of this process."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak-memory measurement."""

    def usable_memory(self) -> int:
        """Return the bytes of device memory available to this process, including memory in use by its tensors."""
        return self.memory().total

    def free_cached_memory(self) -> None:
        """Release cached memory that the allocator holds and no tensor uses."""
        return

    def profiler(self, warm_up: int, steps: int) -> Any:
        """Return a ``torch.profiler.profile`` of host and device, not started; it records ``steps`` after ``warm_up`` steps."""
        from torch.profiler import profile, schedule, supported_activities

        return profile(
            activities=supported_activities(), schedule=schedule(wait=0, warmup=warm_up, active=steps, repeat=1)
        )

    def device_count(self) -> int | None:
        """Return the number of devices of this host, one a process; None if processes share one. Selects no device."""
        return None

    def pci_address(self, local_rank: int) -> str | None:
        """Return the PCI address of a local rank's device, as Linux writes it (``0000:1b:00.0``); None if unknown."""
        return None

    def peak_flops(self) -> float | None:
        """Return the dense bf16 peak of one device in FLOP/s, or None if unknown."""
        return None


class AcceleratorPlatform(Platform):
    """A platform of devices with memory of their own; their module of torch (:attr:`torch_module`) is like ``torch.cuda``."""

    @property
    def torch_module(self) -> Any:
        import torch

        return getattr(torch, self.device_type)

    def device_count(self) -> int:
        return self.torch_module.device_count()

    def synchronize(self) -> None:
        self.torch_module.synchronize()

    def memory(self) -> MemoryFigures:
        module = self.torch_module
        total = module.get_device_properties(module.current_device()).total_memory
        return MemoryFigures(module.memory_allocated(), module.max_memory_allocated(), total)

    def reset_peak_memory(self) -> None:
        self.torch_module.reset_peak_memory_stats()

    def usable_memory(self) -> int:
        # Memory that the allocator has reserved counts as free: this process can reuse it, and the driver cannot see inside.
        free, _ = self.torch_module.mem_get_info()
        return free + self.torch_module.memory_reserved()

    def free_cached_memory(self) -> None:
        self.torch_module.empty_cache()
