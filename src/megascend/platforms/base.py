"""What a platform must offer. One file per platform beside this one; nothing else asks which hardware it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory of this process, in bytes. Zero where the platform cannot tell."""

    allocated: int
    peak: int
    total: int


class Platform(ABC):
    """A kind of device: how to get ready for it, talk over it and measure it. Knows no engine and no provider.

    Attributes:
        name: what users write in ``platform:``.
        device_type: the ``torch.device`` type of tensors.
        backend: the ``torch.distributed`` backend of collectives on device tensors.
        bind_device: True if ``init_process_group`` of several ranks shall be given the device (eager communicators; NCCL only).
        has_transformer_engine_kernels: True if the bootstrap has put the real Transformer Engine in force: fused rotary
            embedding, matrix products that add to Megatron's fp32 gradient buffers.
        implicit_causal_masks: True if the attention kernel must not be given a dense causal mask.
        attention_draws_its_own_dropout: True if the fused attention draws dropout masks itself, knowing neither eval() nor
            Megatron's random streams.
        packed_lengths_on_host: True if attention reads the ends of packed samples on the CPU; from a device tensor each
            layer would wait for them.
        page_locks_memory: True if copies into page-locked host memory are faster (and known to work here).
        tells_peak_memory: True if :meth:`memory` tells the peak since :meth:`reset_peak_memory`.
        fuses_activations: True if torch.compile can fuse Megatron's gated activations.
        peak_flops: dense bf16 peak of one device in FLOP/s for utilisation figures, or None if unknown.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    backend: ClassVar[str]
    bind_device: ClassVar[bool] = False
    implicit_causal_masks: ClassVar[bool] = False
    attention_draws_its_own_dropout: ClassVar[bool] = False
    packed_lengths_on_host: ClassVar[bool] = False
    page_locks_memory: ClassVar[bool] = False
    tells_peak_memory: ClassVar[bool] = True
    has_transformer_engine_kernels: bool = False
    fuses_activations: bool = False

    @abstractmethod
    def unavailable_because(self) -> str | None:
        """Why this platform cannot be used here, or None. Imports torch, changes nothing."""

    def prepare(self) -> list[str]:
        """Get the process ready for this device, whatever the engine; one line for every change."""
        return []

    def configure_products(self, tf32: bool) -> list[str]:
        """Choose what products of fp32 matrices are, before anything computes one; one line for every change."""
        if tf32:
            raise ConfigError(
                f"tf32=True, but platform {self.name!r} has no TF32: its fp32 products are fp32; leave it False"
            )
        return []

    def check_products(self) -> None:
        """Raise PlatformError unless products of fp32 matrices are fp32. Called where precision fp32 was asked for."""
        return

    def limit_collectives(self, timeout_s: float) -> list[str]:
        """Give what is below torch the run's timeout, before groups are created; one line for every change."""
        return []

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Select and return the device of this process."""

    def start_ahead(self, local_rank: int) -> None:
        """Begin, on a thread, with what the first use of this process's device would wait for; a matter of time alone."""
        return

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Device memory of this process."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak-memory measurement."""

    def room(self) -> int:
        """Bytes that tensors of this process can have in all, those there are among them."""
        return self.memory().total

    def free_cached_memory(self) -> None:
        """Give memory back to the device that the allocator keeps and nothing uses."""
        return

    def profiler(self, warm_up: int, steps: int) -> Any:
        """A ``torch.profiler.profile`` of host and device, not started: it records ``steps`` steps after ``warm_up`` others."""
        from torch.profiler import profile, schedule, supported_activities

        return profile(
            activities=supported_activities(), schedule=schedule(wait=0, warmup=warm_up, active=steps, repeat=1)
        )

    def device_count(self) -> int | None:
        """Devices of this host, each for one process; None where processes share one. Imports torch, selects no device."""
        return None

    def pci_address(self, local_rank: int) -> str | None:
        """Of the device that a process of this host uses, as Linux writes it (``0000:1b:00.0``); None where it is not told."""
        return None

    def peak_flops(self) -> float | None:
        """Dense bf16 peak of one device in FLOP/s, or None if unknown."""
        return None
