"""Which device a process uses, and what the device says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch

from simnpu import identity
from simnpu.identity import chip
from simnpu.order import ORDER
from simnpu.visible import CURRENT, device_count, existing


@dataclass(frozen=True)
class DeviceProperties:
    """Result of ``get_device_properties``."""

    name: str
    total_memory: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 0
    cube_core_num: int = 0
    vector_core_num: int = 0


def is_available() -> bool:
    """Check whether a device is visible."""
    return device_count() > 0


def device_index(device: torch.device | str | int | None) -> int:
    """Return the index that ``device`` stands for; None and a device without index are the current one."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type not in ("npu", "cuda"):  # torch.cuda's functions, sent here by transfer_to_npu, say cuda
            raise ValueError(f"Expected a npu device, but got: {device}")
        device = device.index
    if device is None:
        return CURRENT.index
    return existing(device)


def current_device() -> int:
    """Index of the device that this thread has set (0 at first)."""
    return CURRENT.index


def set_device(device: torch.device | str | int) -> None:
    """Use this device in this thread from now on."""
    CURRENT.index = device_index(device)


def exchange_device(device: int) -> int:
    """Use this device from now on, unless its number is negative.

    Returns:
        the one in use before.
    """
    before = CURRENT.index
    if device >= 0:
        set_device(device)
    return before


class device:
    """Context manager that uses a device and goes back to the one before; None and negative indices do nothing."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self.idx = CURRENT.index if device is None or device == -1 else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = CURRENT.index
        CURRENT.index = self.idx

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        CURRENT.index = self.prev_idx


class device_of(device):
    """Context manager that uses the device of a tensor, if it is on an NPU."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device if obj.device.type == "npu" else None)


def get_device_name(device_name: torch.device | str | int | None = None) -> str:
    """Return a name that says that the device is simulated, unless ``SIMNPU_DEVICE_NAME`` gives it a chip's name."""
    device_index(device_name)
    return identity.device_name()


def get_device_properties(device_name: torch.device | str | int | None = None) -> DeviceProperties:
    """Return name and cores of the chip, and the host's memory as ``total_memory`` in bytes."""
    device_index(device_name)
    cores = {"cube_core_num": model.cube_cores, "vector_core_num": model.vector_cores} if (model := chip()) else {}
    return DeviceProperties(identity.device_name(), psutil.virtual_memory().total, **cores)


def get_device_capability(device: torch.device | str | int | None = None) -> None:
    """None, as in torch_npu: compute capability is a CUDA notion."""
    return


def can_device_access_peer(device: int, peer_device: int) -> bool:
    """Check whether two different devices were named: all devices of a process can copy to each other."""
    return device_index(device) != device_index(peer_device)


def is_initialized() -> bool:
    """Return True: the simulated device needs no initialisation."""
    return True


def init() -> None:
    """Do nothing: see :func:`is_initialized`."""


def _lazy_init() -> None:
    """Do nothing: see :func:`is_initialized`."""


def _lazy_call(cb: Callable[[], object]) -> None:
    """Run now what the real module may put off until a device is initialised."""
    cb()


def _is_in_bad_fork() -> bool:
    """Return False: a forked process can use the simulated device: it is CPU memory."""
    return False


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Return at once: every operator has finished when its call returns."""
    index = device_index(device)
    if ORDER:
        ORDER.host_waits_for_device(index)


def is_bf16_supported(including_emulation: bool = False) -> bool:
    """Return True, as on the 910B generation."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that autocast may use; torch asks the device module for them."""
    return [torch.float16, torch.bfloat16]


def utilization(device: torch.device | str | int | None = None) -> int:
    """0: nothing is measured here."""
    device_index(device)
    return 0
