"""Races between streams, in strict mode: what is read without having waited is poison, and a warning names both operators.

Poison is NaN, the largest integer, or the opposite of a boolean. It replaces what the racing operator reads, what it wrote if it
overwrote, and the results of an operator that still read what is overwritten. A copy to pinned memory arrives there when the host
waits for it; until then that memory holds poison.

Source: torch_npu (Ascend/pytorch 9e73e708), CopyKernelOpApi.cpp, CachingHostAllocator.cpp (a copy synchronises unless it is
non_blocking and its host side pinned), ToKernelNpu.cpp, LocalScalarDenseNpu.cpp.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from simnpu.errors import StreamRaceWarning
from simnpu.host_memory import is_pinned
from simnpu.memory import cpu_view, extent, npu_view
from simnpu.order import ORDER, Access, Accesses, Order, Queue, current, is_stream, queue_of
from simnpu.visible import index_of

ACCESSES = "_npu_accesses"  # attribute of a storage
FUSED = "a fused operator"
WITHOUT_ACCESS = {"resize_", "set_", "_has_compatible_shallow_copy_type", "record_stream"}
ALLOCATIONS = {"empty.memory_format", "empty_strided"}
COPIES = {"copy_", "_copy_from", "_to_copy"}
_references: set[Any] = set()  # to storages, for the callbacks
_reported: set[tuple[Any, ...]] = set()


def poison_(tensor: Tensor) -> Tensor:
    """Overwrite a CPU tensor."""
    if tensor.dtype == torch.bool:
        return tensor.logical_not_()
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return tensor.fill_(torch.nan if has_nan else torch.iinfo(tensor.dtype).max)


def region(storage: Any, dtype: torch.dtype, begin: int, end: int) -> Tensor | None:
    """Return bytes ``begin`` to ``end`` of a weakly referenced storage as a CPU tensor, None if it is gone."""
    if (alive := storage()) is None:
        return None
    size = dtype.itemsize
    tensor = torch.empty(0, dtype=dtype, device=alive.device).set_(alive, begin // size, [(end - begin) // size], [1])
    return tensor if tensor.is_cpu else cpu_view(tensor)


class Launch:
    """The accesses of one operator, on the current stream of its device or on a given queue."""

    def __init__(self, order: Order, operator: str, queue: Queue | None = None) -> None:
        self.order, self.operator, self.queue = order, operator, queue
        self.accesses: list[Access] = []
        self.results: list[Any] = []  # what is written: arguments of region
        self.overwritten: list[Tensor] = []  # while others used it

    def argument(self, value: Any, writes: bool) -> Any:
        """Return an argument as the operator sees it."""
        if not isinstance(value, Tensor):
            return [self.argument(item, writes) for item in value] if isinstance(value, (list, tuple)) else value
        if value.get_device() < 0 or not value.numel():
            return value
        racing = self.enter(value, writes)
        if writes:
            self.overwritten += [value] if racing else []
            return value
        if racing or source_changed(value):
            return npu_view(poison_(torch.empty_like(cpu_view(value))), value.get_device())
        return value

    def enter(self, tensor: Tensor, writes: bool) -> bool:
        """Enter an access of a tensor; return whether it is a race."""
        queue = self.queue or current(tensor.get_device())
        storage, size = tensor.untyped_storage(), tensor.element_size()
        with self.order.lock:
            self.order.counts[queue] += 1
            begin = int(tensor.storage_offset()) * size
            end = begin + int(tensor.numel() if tensor.is_contiguous() else extent(tensor)) * size
            access = Access(queue, self.order.counts[queue], self.operator, writes, begin, end)
            racing = self.order.enter(accesses_of(self.order, storage, queue), access)
        self.accesses.append(access)
        if writes:
            self.results.append((weakref.ref(storage), tensor.dtype, begin, end))
        if racing:
            remedy = "work.wait()" if racing.finish else "wait_stream or wait_event"
            report(access, "overwrites" if writes else "reads", racing, remedy)
        return racing is not None

    def returned(self, result: Any, arguments: Any) -> None:
        """Enter what the operator returned."""
        for value in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(value, Tensor):
                if value.get_device() >= 0 and not any(value is argument for argument in arguments):
                    self.enter(value, writes=True)
            elif value is not None and self.accesses:  # a number, for which the host waits
                self.order.host_waits(self.order.now(self.accesses[0].queue))
        for access in self.accesses:
            access.results = self.results
        self.poison_overwritten()

    def poison_overwritten(self) -> None:
        while self.overwritten:
            poison_(cpu_view(self.overwritten.pop()))


def accesses_of(order: Order, storage: Any, queue: Queue) -> Accesses:
    """Return a storage's accesses. A new storage may have got memory that was freed in its queue's pool."""
    if ACCESSES not in storage.__dict__:
        accesses = Accesses(queue)
        setattr(storage, ACCESSES, accesses)
        _references.add(weakref.ref(storage, functools.partial(freed, order, accesses)))
        for other in order.freed.pop(queue, ()):
            if not order.precedes(other, queue):
                report(Access(queue, 0, "an allocation", True), "reuses", other, "record_stream")
    return storage.__dict__[ACCESSES]


def freed(order: Order, accesses: Accesses, reference: Any) -> None:
    """Note which other streams still use memory that goes back to its pool. HCCL records its streams itself."""
    _references.discard(reference)
    for access in accesses:
        if (
            is_stream(access.queue)
            and access.queue not in accesses.recorded
            and not order.precedes(access, accesses.pool)
        ):
            order.freed[accesses.pool].append(access)


def resized(storage: Any, size: int) -> None:
    """Give a storage's memory back if it has none left, as FSDP frees parameters; allocate it again if it has."""
    if ORDER and size:
        accesses_of(ORDER, storage, current(storage.device.index))
    elif ORDER and (accesses := storage.__dict__.pop(ACCESSES, None)) is not None:
        freed(ORDER, accesses, None)
        accesses.clear()


def report(access: Access, verb: str, racing: Access, remedy: str) -> None:
    """Warn of a race, once for two operators and their queues. Poison the earlier one's results, if it read."""
    if racing.finish:
        racing.finish()
    for result in [] if racing.writes else racing.results:
        if (tensor := region(*result)) is not None:
            poison_(tensor)
    places = [f"{a.operator} on npu:{a.queue[0]} {a.queue[1]}" for a in (access, racing)]
    if (key := (verb, *places)) in _reported:
        return
    _reported.add(key)
    action = "writes" if racing.writes else "reads"
    message = f"race: {places[0]} {verb} what {places[1]} {action}, without waiting: {remedy}"
    warnings.warn(message, StreamRaceWarning, stacklevel=frames_to_caller())


def frames_to_caller() -> int:
    """Count the frames from :func:`report` to the program, past simnpu and PyTorch."""
    frame, count = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ("simnpu", "torch"):
        frame, count = frame.f_back, count + 1
    return count


@functools.cache
def written(name: str) -> frozenset[int | str]:
    """Return the arguments that ``aten::<name>`` writes to, by position and by name."""
    base, _, overload = name.partition(".")
    if base == "_copy_from":  # its schema does not say so
        return frozenset([1])
    arguments = getattr(getattr(torch.ops.aten, base), overload or "default")._schema.arguments
    places = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return frozenset([*places, *(arguments[i].name for i in places)])


def ordered(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` of ``aten::<name>`` with its accesses checked, in strict mode."""
    if ORDER is None or name in WITHOUT_ACCESS:
        return kernel
    order, looks_at_sizes_only = ORDER, "_like" in name or name.startswith("new_")
    if name in ALLOCATIONS:
        return allocating(order, kernel)
    if name in COPIES:
        return copying(order, name, kernel)
    if name == "_foreach_copy_":
        return copying_each

    def call(*args: Any, **kwargs: Any) -> Any:
        launch = Launch(order, f"aten::{name}")
        if not looks_at_sizes_only:
            places = written(name)
            args = tuple(launch.argument(value, i in places) for i, value in enumerate(args))
            kwargs = {key: launch.argument(value, key in places) for key, value in kwargs.items()}
        result = kernel(*args, **kwargs)
        launch.returned(result, (*args, *kwargs.values()))
        return result

    return call


def allocating(order: Order, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an allocation, after which the memory belongs to the current stream's pool."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = kernel(*args, **kwargs)
        accesses_of(order, tensor.untyped_storage(), current(tensor.get_device()))
        return tensor

    return call


def record_stream(tensor: Tensor, stream: Any) -> None:
    """aten::record_stream."""
    if ORDER:
        accesses_of(ORDER, tensor.untyped_storage(), current(tensor.get_device())).recorded.add(queue_of(stream))


def fused_argument(tensor: Tensor) -> Tensor:
    """Return an argument of an operator of torch_npu as it sees it."""
    return tensor if ORDER is None else Launch(ORDER, FUSED).argument(tensor, writes=False)


def fused_result(tensor: Tensor) -> Tensor:
    """Enter what an operator of torch_npu wrote."""
    if ORDER:
        Launch(ORDER, FUSED).returned(tensor, ())
    return tensor


@dataclass(eq=False)
class Transfer:
    """A copy between a device and pinned memory for which the host has not waited."""

    access: Access
    host: Tensor
    device: Tensor
    values: Tensor
    to_host: bool

    def source_changed(self) -> bool:
        """Check whether the host changed what is copied to a device, and report it."""
        if self.to_host or torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (self.host, self.values))):
            return False
        host = Access((self.access.queue[0], "host"), 0, "the program", True)
        report(host, "changes the pinned memory of", self.access, "synchronize before")
        return True


_transfers: list[Transfer] = []


def source_changed(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage() if _transfers else None
    return any(t.device.untyped_storage() is storage and t.source_changed() for t in _transfers)


def end_transfers(ended: Callable[[Transfer], bool]) -> None:
    """Let the values of copies that have ended arrive."""
    for transfer in [transfer for transfer in _transfers if ended(transfer)]:
        _transfers.remove(transfer)
        if transfer.to_host:
            transfer.host.copy_(transfer.values)
        transfer.source_changed()


def copying(order: Order, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of a copy. The host waits, unless it is non_blocking and the host's side pinned and contiguous."""

    def call(*args: Any, **kwargs: Any) -> Any:
        launch, places = Launch(order, f"aten::{name}"), written(name)
        indices = [t.get_device() for t in args[:2] if t.device.type == "npu"]
        queue = current(indices[0] if indices else index_of(kwargs["device"]))
        for source in args[:2]:  # an earlier copy to it, which this stream has waited for
            end_transfers(
                lambda t, source=source: (
                    source.is_cpu
                    and t.host.untyped_storage() is source.untyped_storage()
                    and order.precedes(t.access, queue)
                )
            )
        args = tuple(launch.argument(value, i in places) for i, value in enumerate(args))
        result = kernel(*args, **kwargs)
        launch.returned(result, args)
        tensors = [*args[:2], result]
        host = next((t for t in tensors if t.is_cpu), None)
        device = next((t for t in tensors if t.device.type == "npu"), None)
        if host is None or device is None or not host.numel():
            return result
        non_blocking = kwargs.get("non_blocking", False) or args[2:] == (True,)
        if not (non_blocking and is_pinned(host) and host.is_contiguous() and host.shape == device.shape):
            order.host_waits(order.now(queue))
            return result
        transfer = Transfer(launch.accesses[0], host.detach(), device.detach(), host.detach().clone(), host is result)
        if transfer.to_host:
            launch.accesses[0].results = [(weakref.ref(transfer.values.untyped_storage()), host.dtype, 0, host.nbytes)]
            poison_(transfer.host)
        _transfers.append(transfer)
        return result

    return call


def copying_each(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


if ORDER:
    _host = ORDER.host
    ORDER.host_has_waited.append(
        lambda: end_transfers(lambda t: t.access.number <= _host.get(t.access.queue, 0)) if _transfers else None
    )
