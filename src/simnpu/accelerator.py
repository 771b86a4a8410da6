"""``torch.accelerator`` and PyTorch's generic ``Stream``, ``Event`` and ``Generator`` for the simulated device.

PyTorch asks its device guard and its allocator; those of a device written in Python know one device, no stream and no
memory. The functions behind ``torch.accelerator`` are answered by ``torch.npu`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from simnpu.visible import DEVICE


def install() -> None:
    """Put ``torch.npu``'s answers behind ``torch.accelerator``."""
    from simnpu.npu import devices, memory, random, streams

    answers: dict[str, Callable[..., Any]] = {
        "getDeviceIndex": devices.current_device,
        "setDeviceIndex": devices.set_device,
        "exchangeDevice": devices.exchange_device,
        "maybeExchangeDevice": devices.exchange_device,
        "getStream": streams.current_stream,
        "setStream": streams.set_stream,
        "synchronizeDevice": devices.synchronize,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": memory.empty_cache,
        "emptyHostCache": memory.empty_cache,
        "getDeviceStats": memory.memory_stats_as_nested_dict,
        "resetAccumulatedStats": memory.reset_accumulated_memory_stats,
        "resetPeakStats": memory.reset_peak_memory_stats,
        "getMemoryInfo": memory.mem_get_info,
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_accelerator_{name}", answer)
    makers = {"Stream": streams.Stream, "Event": streams.event_of_device, "Generator": random.Generator}
    for kind, simulated in makers.items():
        original = getattr(torch, kind)
        own: Any = type(original)  # e.g. that of torch.Generator, which a subclass's must extend
        meta = Redirected if own is type else type("Redirected", (Redirected, own), {})
        body = {"__module__": "torch", "original": original, "simulated": staticmethod(simulated), "devices": (DEVICE,)}
        setattr(torch, kind, meta(kind, (original,), body))


class Redirected(type):
    """The type of a class of PyTorch's that makes instances of another one for the simulated device.

    ``simulated`` among its attributes makes them, for the device types ``devices``; their class extends ``original``.
    """

    original: Any
    simulated: Any
    devices: tuple[str, ...]

    def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device is None:
            plain = cls.original is torch._C.Generator or "stream_id" in kwargs
            return cls.original(*args, **kwargs) if plain else cls.simulated(None, *args, **kwargs)
        if isinstance(device, int) or torch.device(device).type in cls.devices:
            return cls.simulated(device, *args, **kwargs)
        return cls.original(device, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)
