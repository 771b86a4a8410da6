"""Interface of a transport, the registry of transports, and their waits for the work of a device.

A transport moves buckets from the sender to all receivers of one group, in order. It is created when all members have joined, and
serves one update. To add one, write a file with a class and a row in :data:`TRANSPORTS` or, from another package, call
:func:`register_transport`.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from weightwire.background import BackgroundThread
from weightwire.errors import DeadlineError, TransportError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from weightwire.group import Group
    from weightwire.manifest import Manifest


class Work(Protocol):
    """A bucket in flight."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the buffer may be used again: overwritten on the sender, read by any stream on a receiver.

        An implementation calls ``group.check()`` at least every :data:`POLL_S`, so that the loss of a member ends the wait.

        Raises:
            DeadlineError: not completed within ``timeout_s`` seconds.
            PeerLostError: a member is known to be lost.
            TransportError: any other failure; ``Group.explain`` then looks for the member at fault.
        """
        ...


class Transport(Protocol):
    """Broadcast of buckets to all receivers of a group. Created on every member, with the same name and options.

    ``send`` and ``receive`` start a transfer and do not wait; transfers complete in order, at the latest during their
    :meth:`Work.wait`. At most two are in flight, or ``receives_in_flight`` on a receiver if the class has that attribute. The
    sender only sends, receivers only receive, each from one thread.
    """

    def send(self, buffer: torch.Tensor) -> Work:
        """Start to send ``buffer`` (uint8, contiguous, on the setup's device), which stays unmodified until the work completes.

        The caller has synchronised the stream that fills the buffer: an implementation need not wait for other streams.
        """
        ...

    def receive(self, buffer: torch.Tensor) -> Work:
        """Start to fill ``buffer`` (uint8, contiguous, on the setup's device) with the next bucket, which has its size."""
        ...

    def abort(self) -> None:
        """Cancel transfers in flight, as far as the medium can, after a failure. Called before :meth:`close`, if at all."""
        ...

    def close(self) -> None:
        """Release all resources, without waiting for other members. May be called twice."""
        ...


class PairTransport(Protocol):
    """Messages between any two members of a group, for sharded updates. Created on every member, with the same name and options.

    As in :class:`Transport`, starting a transfer does not wait. Transfers between two members complete in the order in which both
    have started them; a member may have several in flight, with several peers.
    """

    def send_to(self, buffer: torch.Tensor, peer: int) -> Work:
        """Start to send ``buffer`` (uint8, contiguous, on the setup's device) to a member; see :meth:`Transport.send`."""
        ...

    def receive_from(self, buffer: torch.Tensor, peer: int) -> Work:
        """Start to fill ``buffer`` (uint8, contiguous, on the setup's device) with a member's next message, of its size."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """Arguments of a transport's constructor.

    Attributes:
        group: complete group; rank 0 sends. ``group.store("transport")`` is reserved for the transport.
        manifest: manifest of the tensors to transfer.
        device: device of the buffers.
        timeout_s: deadline, in seconds, of the constructor's waits.
        options: the transport's settings, JSON, the same on all members: the sender chooses them.
        largest: largest message that this member sends, in bytes, if it is known to be smaller than a bucket.
    """

    group: Group
    manifest: Manifest
    device: torch.device
    timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    largest: int | None = None


Factory = Callable[[Setup], Transport]

POLL_S = 0.2
"""Longest interval between two checks of the other members during a wait, in seconds."""


@dataclass(frozen=True)
class TransportKind:
    """A transport as the registry describes it.

    Attributes:
        factory: called with a :class:`Setup` on every member; of one of ours, its class as ``MODULE:CLASS``, which is imported on
            demand, since some need libraries that may be missing.
        device_types: supported types of the buffers' torch device, the preferred one first.
        automatic: ``auto`` may choose it: it needs no options.
        pairs: how it carries sharded updates: ``direct`` if its library has messages between two members, ``paired`` if every
            (sender, receiver) creates its own, as a group of two; empty if it only broadcasts.
    """

    factory: Factory | str
    device_types: tuple[str, ...]
    automatic: bool = False
    pairs: Literal["direct", "paired", ""] = ""


_FROM = "weightwire.transports"
_ANY = ("cpu", "cuda", "npu")
TRANSPORTS = {
    "nccl": TransportKind(f"{_FROM}.nccl:NcclTransport", ("cuda",), True, "direct"),
    "cuda_ipc": TransportKind(f"{_FROM}.cuda_ipc:CudaIpcTransport", ("cuda",), True, "paired"),
    "hccl": TransportKind(f"{_FROM}.hccl:HcclTransport", ("npu",), True, "direct"),
    "gloo": TransportKind(f"{_FROM}.gloo:GlooTransport", ("cpu",), True, "direct"),
    "shared_memory": TransportKind(f"{_FROM}.shared_memory:SharedMemoryTransport", _ANY, True, "paired"),
    "vllm_hccl": TransportKind("weightwire.vllm.hccl_transport:VllmHcclTransport", ("npu",)),
    "files": TransportKind(f"{_FROM}.files:FilesTransport", _ANY),
}
"""All transports by name, those that ``auto`` may choose in the order of preference: fastest first."""


def register_transport(name: str, factory: Factory, device_types: Collection[str]) -> None:
    """Register a transport in this process under ``name``; both sides must do so.

    Args:
        factory: called with a :class:`Setup` on every member, when all have joined.
        device_types: supported types of the buffers' torch device, the preferred one first: ``("cuda",)``.

    Raises:
        TransportError: the name is taken.
    """
    # Both sides look transports up by name: one name with two meanings would connect different protocols.
    if name in TRANSPORTS or name == "auto":  # "auto" stands for a choice
        raise TransportError(f"transport {name!r} is already registered; known: {', '.join(transport_names())}")
    TRANSPORTS[name] = TransportKind(factory, tuple(device_types))


def transport_names() -> list[str]:
    """Return all names, sorted."""
    return sorted(TRANSPORTS)


def transport_kind(name: str) -> TransportKind:
    """Return a transport's row; TransportError if it is unknown."""
    if name not in TRANSPORTS:
        raise TransportError(f"unknown transport {name!r}; known: {', '.join(transport_names())}")
    return TRANSPORTS[name]


def device_types(name: str) -> tuple[str, ...]:
    """Return the supported types of the buffers' device, the preferred one first; TransportError if it is unknown."""
    return transport_kind(name).device_types


def transports_for(device_type: str) -> list[str]:
    """Return the names of the transports that support a type of device, sorted."""
    return [name for name in transport_names() if device_type in device_types(name)]


def make_transport(name: str, setup: Setup) -> Transport:
    """Create a transport by name, ready to send or receive.

    Raises:
        TransportError: the transport is unknown, or cannot be set up.
    """
    factory = transport_kind(name).factory
    if not isinstance(factory, str):
        return factory(setup)
    module, _, attribute = factory.partition(":")
    return getattr(import_module(module), attribute)(setup)


def make_pairs(name: str, setup: Setup, largest: Mapping[int, int] | None = None) -> PairTransport:
    """Create a transport of messages by name.

    Args:
        largest: largest message that this member sends to each peer, in bytes; default: a bucket.
    """
    if transport_kind(name).pairs == "paired":
        return PairedTransport(name, setup, largest or {})
    transport: Any = make_transport(name, setup)  # its class has both interfaces
    return transport


class PairedTransport:
    """A transport for each (sender, receiver), created at their first message."""

    def __init__(self, name: str, setup: Setup, largest: Mapping[int, int]) -> None:
        self._name, self._setup, self._largest = name, setup, largest
        self._transports: dict[tuple[int, int], Transport] = {}

    def send_to(self, buffer: torch.Tensor, peer: int) -> Work:
        return self._transport(self._setup.group.rank, peer).send(buffer)

    def receive_from(self, buffer: torch.Tensor, peer: int) -> Work:
        return self._transport(peer, self._setup.group.rank).receive(buffer)

    def _transport(self, sender: int, receiver: int) -> Transport:
        key = sender, receiver
        if key not in self._transports:
            pair: Any = Pair(self._setup.group, sender, receiver)
            setup = replace(self._setup, group=pair, largest=self._largest.get(receiver))
            self._transports[key] = make_transport(self._name, setup)
        return self._transports[key]

    def abort(self) -> None:
        for transport in self._transports.values():
            transport.abort()

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


class Pair:
    """Two members of a group as a group of their own: the sender has rank 0, the receiver rank 1."""

    def __init__(self, group: Group, sender: int, receiver: int) -> None:
        self._group, self._ranks = group, (sender, receiver)
        self.name, self.host, self.port = group.name, group.host, group.port
        self.rank, self.size = self._ranks.index(group.rank), 2

    def member(self, rank: int) -> str:
        return self._group.member(self._ranks[rank])

    def store(self, purpose: str, timeout_s: float) -> Any:
        sender, receiver = self._ranks
        return self._group.store(f"{purpose}/{sender}/{receiver}", timeout_s)

    def check(self) -> None:
        self._group.check()


RECEIVES_IN_FLIGHT = 2
"""Transfers in flight on a receiver, for a transport that does not say otherwise: the sender has two buffers."""
FIRST_PAUSE_S = 20e-6
MAX_PAUSE_S = 5e-3
SHARE = 0.02
"""Pause as a share of the time waited so far: a short wait is hardly prolonged, a long one takes no CPU."""
EXIT_S = 5.0
"""Longest time that the exit of the process waits for threads in calls of a library, in seconds."""


def wait_until(condition: Callable[[], bool], group: Group, timeout_s: float, failure: str) -> None:
    """Wait until ``condition()`` holds.

    Raises:
        DeadlineError: it did not within ``timeout_s`` seconds; the message begins with ``failure``.
        PeerLostError: a member of the group is known to be lost.
    """
    start = time.monotonic()
    while not condition():
        group.check()
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise DeadlineError(f"{failure} within {timeout_s:g} s")
        time.sleep(min(max(FIRST_PAUSE_S, waited * SHARE), MAX_PAUSE_S))


def wait_for_keys(keys: Sequence[str], store: Store, group: Group, timeout_s: float, failure: str) -> None:
    """Wait until all keys exist in a store, as :func:`wait_until`; TransportError if the store does not answer."""
    try:
        # Polled: the store's own wait could not be ended by the loss of a member.
        wait_until(lambda: store.check(list(keys)), group, timeout_s, failure)
    except RuntimeError as error:
        if isinstance(error, TransportError):
            raise
        raise TransportError(f"the store does not answer: {first_line(error)}") from error


class DeferredWork:
    """A transfer that happens when it is waited for.

    Args:
        transfer: makes the transfer, within the seconds that it receives.
        label: label of the bucket, for messages.
        buffer: kept alive until then, if the device or another process uses it.
    """

    def __init__(self, transfer: Callable[[float], None], label: str, buffer: torch.Tensor | None = None) -> None:
        self._transfer, self._label, self._buffer, self._completed = transfer, label, buffer, False

    def wait(self, timeout_s: float) -> None:
        if self._completed:
            return
        try:
            self._transfer(timeout_s)
        except (OSError, RuntimeError) as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"{self._label}: {type(error).__name__}: {error}") from error
        self._completed = True


class DeviceWork:
    """An asynchronous collective of a torch process group. It keeps its buffer alive until it completes.

    Args:
        work: the process group's handle.
        name: name of the transport, for messages.
    """

    def __init__(self, work: Any, buffer: torch.Tensor, group: Group, name: str) -> None:
        self._work, self._buffer, self._group, self._name = work, buffer, group, name

    @property
    def ended(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        # Polled: the library's own wait would not notice the loss of a member before its time-out.
        wait_until(self._work.is_completed, self._group, timeout_s, f"{self._name}: a bucket has not travelled")
        try:
            # It has ended: this raises an error that the library has recorded. Without a timeout NCCL's would not.
            self._work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise TransportError(f"{self._name}: {first_line(error)}") from error

    def give_up(self) -> None:
        """Cancel the collective unless it has ended: a timed wait that expires aborts NCCL's communicator."""
        if not self.ended:
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(milliseconds=1))


class ThreadWork:
    """A transfer whose library only has a wait that blocks: it is made on a thread, so that the loss of a member ends the wait.

    Args:
        wait: blocks until the transfer is complete, or raises.
        buffer: kept alive until then.
        name: name of the transport, for messages.
        failure: the beginning of the message at the deadline.
    """

    def __init__(
        self,
        wait: Callable[[], object],
        buffer: torch.Tensor,
        group: Group,
        name: str,
        failure: str = "a message has not travelled",
    ) -> None:
        self._buffer, self._group, self._name, self._failure = buffer, group, name, failure
        self._problem: BaseException | None = None
        self._ended = threading.Event()
        # A daemon: the exit of the process must not wait for long for a peer that is silent.
        thread = BackgroundThread(self._run, wait, name=f"weightwire-{name}")
        thread.start()
        _threads.add(thread)

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001  wait() raises it; a thread that ended without would look like a silent peer
            self._problem = error
        self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._ended.wait(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            self._group.check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"{self._name}: {self._failure} within {timeout_s:g} s")
        if self._problem is not None:
            raise TransportError(f"{self._name}: {first_line(self._problem)}") from self._problem


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _join_threads() -> None:
    """Wait for threads whose library is about to return: the interpreter's end within its code would abort the process."""
    deadline = time.monotonic() + EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


InFlight = TypeVar("InFlight", bound="DeviceWork | ThreadWork")


def tracked(in_flight: list[DeviceWork | ThreadWork], work: InFlight) -> InFlight:
    """Add a transfer to those in flight, and forget those that have ended.

    A transport keeps them until then, since its abort must reach every transfer that may still occupy the device.
    """
    in_flight[:] = [*(other for other in in_flight if not other.ended), work]
    return work


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without torch's C++ frames."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
