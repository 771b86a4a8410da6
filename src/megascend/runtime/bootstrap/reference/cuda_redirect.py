"""Redirect the ``torch.cuda`` API that megatron-core uses to the CPU, in processes without an accelerator.

``torch.cuda.is_available()`` stays False and ``device_count()`` stays 0, so code that checks gets the truth. Only code that
uses "cuda" without a check is redirected to the CPU.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megascend.changes import ABSENT, restore
from megascend.errors import ImportOrderError, PlatformError

CPU = torch.device("cpu")
MOE_MODULES = ("megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.token_dispatcher")
MOE_FUNCTION = "maybe_move_tensor_to_cpu"

# (owner, name, original value) of every active patch, newest last; ABSENT if the attribute did not exist.
_undo: list[tuple[Any, str, Any]] = []


class Stream:
    """The interface of a CUDA stream. The CPU runs everything in program order, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """The interface of a CUDA event; stores the time of its record."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        if self._seconds is None or end._seconds is None:
            raise PlatformError("elapsed_time needs both events to be recorded")
        return (end._seconds - self._seconds) * 1e3


class _Generators:
    """``torch.cuda.default_generators``: the CPU's generator at every index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def install() -> list[str]:
    """Redirect the API to the CPU and return one line for each group of changes. Idempotent."""
    if _undo:
        return []
    if torch.cuda.is_available():
        raise PlatformError("torch.cuda is real on this machine and is not redirected to the CPU")
    # torch caches the set of factory functions on its first use. It must hold the originals: a wrapped factory would
    # not be recognised inside ``with torch.device("meta")``, and a rotary table built there would be garbage.
    factories = _device_constructors()
    names = sorted(name for name, value in vars(torch).items() if _is_in(value, factories))
    for name in names:
        _patch(torch, name, _factory(getattr(torch, name)))
    _patch_runtime()
    _patch_random()
    _patch_tensor()
    return [
        f"torch.{{{', '.join(names)}}}: device='cuda' means the CPU; pin_memory is ignored",
        f"torch.Tensor.{{{_names_in(torch.Tensor)}}}: stay on the CPU; type() of a CPU tensor says torch.cuda",
        f"torch.cuda.{{{_names_in(torch.cuda)}}}: act on the CPU, random state in torch.cuda.random too",
        f"torch.cuda.nvtx.{{{_names_in(torch.cuda.nvtx)}}}: name nothing",
    ]


def _names_in(owner: Any) -> str:
    return ", ".join(name for patched_owner, name, _ in _undo if patched_owner is owner)


def uninstall() -> None:
    """Undo all patches, including those of :func:`patch_moe_device_check`. For tests."""
    while _undo:
        owner, name, before = _undo.pop()
        restore(owner, name, before)


def patch_moe_device_check(name: str) -> list[str]:
    """Make a module of megatron-core's MoE dispatcher convert token counts on the CPU to numpy, too. Idempotent.

    Its ``maybe_move_tensor_to_cpu(tensor, as_numpy=True)`` converts only CUDA tensors, so the all-to-all would get a tensor
    instead of integers.
    """
    if name not in sys.modules:
        raise ImportOrderError(f"import megatron.core first; not imported: {name}")
    module = sys.modules[name]
    if getattr(module, MOE_FUNCTION) is move_to_cpu:
        return []
    _patch(module, MOE_FUNCTION, move_to_cpu)
    return [f"{name}.{MOE_FUNCTION}: also converts tensors that are on the CPU already"]


def _is_in(value: Any, functions: set[Any]) -> bool:
    if isinstance(value, FunctionType):
        # A wrapper that was installed earlier (the simulated NPU has some) is redirected too; torch lists the originals.
        value = inspect.unwrap(value)
    return callable(value) and getattr(value, "__hash__", None) is not None and value in functions


def _patch(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, ABSENT)))
    setattr(owner, name, value)


def on_cpu(device: Any) -> Any:
    """Return ``device`` with every form of CUDA ("cuda", "cuda:1", an index, a torch.device) replaced by the CPU."""
    # A bool is an instance of int, but not a device; None leaves the choice to torch.
    if isinstance(device, bool) or device is None:
        return device
    # An index alone names an accelerator, and Megatron-Core means CUDA by it.
    if isinstance(device, int):
        return CPU
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str) and (device == "cuda" or device.startswith("cuda:")):
        return CPU
    return device


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # without CUDA there is no allocator of pinned memory
        return original(*args, **kwargs)

    return factory


def _returning(value: Any) -> Callable[..., Any]:
    """Create a function that returns ``value``; one for each name, because torch.compile refuses one under two names."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return value

    return function


def _patch_runtime() -> None:
    @contextmanager
    def stream(stream: Any = None) -> Iterator[None]:
        yield

    current = Stream()
    replacements = {
        # A torch.device rather than an index: torch's C++ code accepts it for any device argument.
        "current_device": _returning(CPU),
        "set_device": _returning(None),
        "synchronize": _returning(None),
        "empty_cache": _returning(None),
        "_lazy_init": _returning(None),
        "_lazy_call": lambda callback, **kwargs: callback(),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": _returning(current),
        "default_stream": _returning(current),
        "set_stream": _returning(None),
    }
    for name, value in replacements.items():
        _patch(torch.cuda, name, value)
    _patch_ranges()


def _patch_ranges() -> None:
    """Patch ``torch.cuda.nvtx``: without a CUDA profiler only the depth and the handles of ranges are tracked."""
    depth, handles = 0, itertools.count(1)

    def range_push(msg: str) -> int:
        nonlocal depth
        depth += 1
        return depth - 1

    def range_pop() -> int:
        nonlocal depth
        depth -= 1
        return depth

    def range_start(msg: str) -> int:
        return next(handles)

    for function in (range_push, range_pop, range_start):
        _patch(torch.cuda.nvtx, function.__name__, function)
    _patch(torch.cuda.nvtx, "range_end", _returning(None))
    _patch(torch.cuda.nvtx, "mark", _returning(None))


def _patch_random() -> None:
    for owner in (torch.cuda, torch.cuda.random):
        # Fresh functions for each module, see _returning.
        def get_rng_state(device: Any = "cuda") -> torch.Tensor:
            return torch.default_generator.get_state()

        def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
            torch.default_generator.set_state(new_state)

        def manual_seed(seed: int) -> None:
            torch.default_generator.manual_seed(int(seed))

        def manual_seed_all(seed: int) -> None:
            torch.default_generator.manual_seed(int(seed))

        for function in (get_rng_state, set_rng_state, manual_seed, manual_seed_all):
            _patch(owner, function.__name__, function)
    _patch(torch.cuda, "default_generators", _Generators())


def _patch_tensor() -> None:
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(tensor_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return tensor_to(self, *args, **kwargs)

    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = tensor_type(self, *args, **kwargs)
        # megatron-core's optimizers select parameters by this string: torch.cuda.FloatTensor and its fp16 and bf16 variants.
        if not args and not kwargs and self.device == CPU and isinstance(name, str):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def record_stream(self: torch.Tensor, stream: Any) -> None: ...

    replacements = {"to": to, "type": type_, "cuda": cuda, "pin_memory": pin_memory, "record_stream": record_stream}
    for name, value in replacements.items():
        _patch(torch.Tensor, name, value)


def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace Megatron-Core's ``maybe_move_tensor_to_cpu``."""
    if not torch.is_tensor(tensor):
        return tensor
    return tensor.cpu().numpy() if as_numpy else tensor.cpu()
