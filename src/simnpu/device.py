"""A simulated Ascend device: a real ``npu`` torch device, in Python, over CPU memory.

It exists to run and test NPU training code without an NPU. Unlike CPU tensors under a false flag, npu tensors have
their own device, dispatch key, autocast state and random state, and refuse to meet CPU tensors, so that the mistakes
that hardware would show appear here too. Results are the CPU kernels', bit for bit.

Needs a PyTorch that can register a device from Python (``_setup_privateuseone_for_python_backend`` in
``torch.utils.backend_registration``); tested on torch 2.13. A process sees several devices (``visible``), although
PyTorch's guard for such a device counts one, and knows no stream and no memory. What PyTorch asks it is answered elsewhere:

- ``torch.accelerator`` and the generic ``Stream``, ``Event`` and ``Generator`` by ``torch.npu``;
- conversions to ``npu`` without a number, which PyTorch fills in before the operator is called, by replaced functions that
  fill in the current device;
- backward passes: PyTorch's engine has a thread for each device that the guard counts. Once a process has used another
  device than ``npu:0``, they run in the thread that calls them; before, on the engine's thread, as on hardware;
- ``untyped_storage()``: creating and resizing. The memory behind a storage cannot grow; ``resize_(0)``, by which Megatron
  frees an activation that it will recompute, keeps the memory but overwrites it, so that code that reads it too early gets NaN.

The first backward pass of a process, even one on CPU tensors, starts autograd's thread for the device. Processes forked
after that cannot run a backward pass ("Unable to handle autograd's threading in combination with fork-based
multiprocessing"): fork first.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import backend_registration
from torch.utils._device import DeviceContext, _device_constructors

from simnpu import allocations, dynamo, host_memory, kernels, races
from simnpu.errors import PlatformError
from simnpu.host_memory import replace_function
from simnpu.memory import cpu_view, npu_view
from simnpu.order import ORDER, current, stream_queue
from simnpu.random import generator
from simnpu.visible import CURRENT, DEVICE, index_of, only_the_first_is_used

__all__ = ["cpu_view", "generator", "npu_view", "register"]

_libraries: list[torch.library.Library] = []  # kernels live as long as their library object


def register(module: Any) -> None:
    """Make ``npu`` a device of this process. Idempotent; cannot be undone.

    Args:
        module: module that becomes ``torch.npu``, unless one is registered already; :mod:`simnpu.npu` is made for it.

    Raises:
        PlatformError: this PyTorch cannot register a device from Python, or another package has taken its place.
    """
    if _libraries:
        return
    module._initialized = True  # without it torch.utils.checkpoint neither saves nor restores the random state
    _check_torch()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.utils.generate_methods_for_privateuse1_backend()
    if not hasattr(torch, DEVICE):
        torch._register_device_module(DEVICE, module)
    acc: Any = torch._C._acc  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
    acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    _libraries.extend(kernels.register())
    install_storage()
    host_memory.install()
    install_accelerator()
    install_bare_device()
    install_backward()
    dynamo.install()
    atexit.register(_end_profile)


def _check_torch() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise PlatformError(
            f"the simulated npu needs a PyTorch that can register a device from Python (it is tested on 2.13); found "
            f"{torch.__version__}: install torch 2.13"
        )
    backend = torch._C._get_privateuse1_backend_name()
    if backend not in ("privateuseone", DEVICE) or torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::empty.memory_format", "PrivateUse1"
    ):
        raise PlatformError(
            f"PyTorch's one slot for an out-of-tree device is taken by {backend!r}: if that is torch_npu, set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )


def _end_profile() -> None:
    """Stop a profile that still runs when the process ends: it would crash PyTorch's own shutdown."""
    if torch.autograd._profiler_enabled():
        torch.autograd._disable_profiler()


POISON = 0xFF  # as floating point of every width: NaN; as signed integers: -1
LOGICAL_SIZE = "_npu_logical_size"  # attribute of a resized storage; PyTorch keeps its Python object as long as itself


def install_storage() -> None:
    """Teach ``torch.UntypedStorage`` about npu storages. CPU storages behave as before. Idempotent."""
    cls: Any = torch.UntypedStorage
    if hasattr(cls.resize_, "__simnpu__"):
        return
    new, resize, nbytes = cls.__new__, cls.resize_, cls.nbytes

    def __new__(kind: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "npu":
            return new(kind, *args, **kwargs)
        if len(args) > 1 or (args and not isinstance(args[0], int)):
            raise TypeError("an npu storage is created from a number of bytes")
        memory = torch.empty(args[0] if args else 0, dtype=torch.uint8)
        return npu_view(memory, index_of(torch.device(device))).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        return _resize(self, size, nbytes(self)) if self.device.type == "npu" else resize(self, size)

    def logical_nbytes(self: Any) -> int:
        return self.__dict__.get(LOGICAL_SIZE, nbytes(self)) if self.__dict__ else nbytes(self)

    resize_.__simnpu__ = True  # type: ignore[attr-defined]
    cls.__new__, cls.resize_, cls.nbytes, cls.size = __new__, resize_, logical_nbytes, logical_nbytes


def _resize(storage: Any, size: int, capacity: int) -> Any:
    if size > capacity:
        raise RuntimeError(
            f"the simulated npu cannot grow a storage beyond the memory it was created with: asked for {size} bytes, "
            f"created with {capacity}"
        )
    if size < storage.nbytes():
        _bytes_of(storage)[size:].fill_(POISON)
    setattr(storage, LOGICAL_SIZE, size)
    allocations.resize(storage, size)
    races.resized(storage, size)
    return storage


def _bytes_of(storage: Any) -> torch.Tensor:
    elements = npu_view(torch.empty(0, dtype=torch.uint8), storage.device.index)
    return cpu_view(elements.set_(storage))


FUNCTIONS = ("tensor", "as_tensor", "asarray")
METHODS = ("to", "new_tensor")


def install_bare_device() -> None:
    """Let conversions to ``npu`` go to the current device."""
    for name in FUNCTIONS:
        replace_function(name, _numbered)
    for name in METHODS:
        setattr(torch.Tensor, name, _numbered(getattr(torch.Tensor, name)))
    DeviceContext.__torch_function__ = _constructing(DeviceContext.__torch_function__)  # type: ignore[method-assign]


def with_number(device: Any) -> Any:
    """Return a device argument, with the current device's number if it names ``npu`` alone."""
    if (type(device) is torch.device and device.type == DEVICE and device.index is None) or device == DEVICE:
        return torch.device(DEVICE, CURRENT.index)
    return device


def _numbered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if CURRENT.index:  # else PyTorch's answer is right
            args = tuple(with_number(arg) if type(arg) in (str, torch.device) else arg for arg in args)
            if "device" in kwargs:
                kwargs["device"] = with_number(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _constructing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``with torch.device("npu")`` and ``torch.set_default_device("npu")``."""

    @functools.wraps(function)
    def __torch_function__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if CURRENT.index and func in _device_constructors() and (kwargs or {}).get("device") is None:
            kwargs = {**(kwargs or {}), "device": with_number(self.device)}
        return function(self, func, types, args, kwargs)

    return __torch_function__


class Engine(torch._C._ImperativeEngine):
    """PyTorch's engine, which everybody reaches as ``Variable._execution_engine`` (Megatron-Core directly)."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if ORDER:
            ORDER.wait_for_streams(CURRENT.index)
        if only_the_first_is_used() and current(0) == stream_queue(0, 0):  # as its thread
            return super().run_backward(*args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return super().run_backward(*args, **kwargs)


def install_backward() -> None:
    """Put it in the place of PyTorch's."""
    Variable._execution_engine = Engine()


def install_accelerator() -> None:
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
        metaclass: Any = type(original)  # e.g. that of torch.Generator, which a subclass's must extend
        meta = DeviceRedirect if metaclass is type else type("DeviceRedirect", (DeviceRedirect, metaclass), {})
        body = {"__module__": "torch", "original": original, "simulated": staticmethod(simulated), "devices": (DEVICE,)}
        setattr(torch, kind, meta(kind, (original,), body))


class DeviceRedirect(type):
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
