"""What a platform must offer. One file per platform beside this one; nothing else asks which hardware it runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory of this process, in bytes. Zero where the platform cannot tell."""

    allocated: int
    peak: int
    total: int


class Platform(ABC):
    """A kind of device: how to get ready for it, talk over it and measure it.

    Attributes:
        name: what users write in ``platform:``.
        device_type: the ``torch.device`` type of tensors.
        backend: the ``torch.distributed`` backend of collectives on device tensors.
        must_patch_first: True if packages have to be put in place before megatron.core is imported.
        bind_device: True if ``init_process_group`` shall be given the device (eager communicator; NCCL only).
        has_transformer_engine_kernels: True if the real Transformer Engine runs here, on CUDA: fused rotary embedding,
            matrix products that add to Megatron's fp32 gradient buffers.
        fuses_activations: True if torch.compile can fuse Megatron's gated activations.
        peak_flops: dense bf16 peak of one device in FLOP/s for utilisation figures, or None if unknown.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    backend: ClassVar[str]
    must_patch_first: ClassVar[bool]
    bind_device: ClassVar[bool] = False
    has_transformer_engine_kernels: bool = False
    fuses_activations: bool = False

    @abstractmethod
    def unavailable_because(self) -> str | None:
        """Why this platform cannot be used here, or None. Imports torch, changes nothing."""

    @abstractmethod
    def prepare(self) -> list[str]:
        """Put in place what megatron.core needs; returns one line for every change made to the process.

        Raises:
            PlatformError: something is missing; the message says how to install it.
        """

    @abstractmethod
    def finish(self) -> list[str]:
        """Whatever has to be done once megatron.core and mcore_bridge are imported; one line for every change."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Select and return the device of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """Device memory of this process."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak-memory measurement."""

    def peak_flops(self) -> float | None:
        """Dense bf16 peak of one device in FLOP/s, or None if unknown."""
        return None
