"""``torch.compile`` on the simulated device.

Dynamo asks for an interface of every device that it meets; ours is registered when dynamo is imported, which takes
seconds and which most programs never do. So backends that run PyTorch's operators (``eager``, ``aot_eager``) work.
Inductor writes kernels for a device, and there is nothing to run them: it is refused, as by a torch_npu without its
Inductor.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from simnpu.errors import PlatformError
from simnpu.visible import DEVICE


class InductorError(PlatformError):
    """Inductor was to compile code for the simulated device."""


def install() -> None:
    """Register the device with dynamo and Inductor, now or when they are imported."""
    after_import("torch._dynamo.device_interface", register_interface)
    after_import("torch._inductor.compile_fx", refuse_inductor)


def register_interface(device_interface: Any) -> None:
    from simnpu.npu import devices, memory, streams

    class Worker:
        set_device = staticmethod(devices.set_device)
        current_device = staticmethod(devices.current_device)
        get_device_properties = staticmethod(devices.get_device_properties)

    body = {
        "device": devices.device,
        "Event": streams.Event,
        "Stream": streams.Stream,
        "Worker": Worker,
        "get_raw_stream": staticmethod(lambda index: streams.current_stream(index).stream_id),
        "maybe_exchange_device": staticmethod(devices.exchange_device),
        "exchange_device": staticmethod(devices.exchange_device),
        "current_device": staticmethod(devices.current_device),
        "set_device": staticmethod(devices.set_device),
        "device_count": staticmethod(devices.device_count),
        "is_available": staticmethod(devices.is_available),
        "synchronize": staticmethod(devices.synchronize),
        "get_compute_capability": staticmethod(devices.get_device_capability),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: devices.is_bf16_supported()),
        "current_stream": staticmethod(streams.current_stream),
        "set_stream": staticmethod(streams.set_stream),
        "stream": staticmethod(streams.stream),
        "memory_allocated": staticmethod(memory.memory_allocated),
    }
    interface = type("NpuInterface", (device_interface.DeviceInterface,), body)
    device_interface.register_interface_for_device(DEVICE, interface)
    for index in range(devices.device_count()):
        device_interface.register_interface_for_device(f"{DEVICE}:{index}", interface)


def refuse_inductor(compile_fx: Any) -> None:
    inner = compile_fx.compile_fx

    @functools.wraps(inner)
    def refusing(model: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(getattr(getattr(example, "device", None), "type", None) == DEVICE for example in example_inputs):
            raise InductorError(
                "torch.compile with Inductor: the simulated npu has no compiler; "
                'use backend="eager" or "aot_eager", or set TORCHDYNAMO_DISABLE=1'
            )
        return inner(model, example_inputs, *args, **kwargs)

    compile_fx.compile_fx = refusing


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Call ``act`` with a module: at once if it is imported, else at the end of its import."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and adds something to do after its body has run."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            body = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                body(module)
                self.act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
