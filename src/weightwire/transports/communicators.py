"""NCCL and HCCL communicators, which are cached across updates: creating one takes longer than sending a model over it.

A group serves one update, and so does a transport. Its communicator is cached, one for each kind and device, and reused
when the next group has the same processes at the same ranks. All members must have cached the same one, and have started
as many broadcasts on it; otherwise, as after any failure, a new one is created.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions

from weightwire.errors import TransportError
from weightwire.transports.base import DeviceWork, Setup, ThreadWork, first_line, tracked


@dataclass
class Communicator:
    """A connected communicator.

    Attributes:
        handle: the library's object.
        members: its processes, by rank.
        made_in: name of the group that created it; names are used once.
        broadcasts: number started on it by this process.
    """

    handle: Any
    members: tuple[str, ...]
    made_in: str
    broadcasts: int = 0

    @property
    def state(self) -> str:
        """Return a key that is equal on all members if they can reuse the communicator."""
        return f"{self.made_in} {self.broadcasts}"


class Communicators:
    """Communicators of one kind that this process has cached.

    Args:
        make: connects the members of a group; called on all of them.
        end: destroys a communicator that is idle or has failed, without the other members.
    """

    def __init__(self, name: str, make: Callable[[Setup], Any], end: Callable[[Any], None]) -> None:
        self._name, self._make, self._end = name, make, end
        self._cached: dict[str, Communicator] = {}
        self._lock = threading.Lock()

    def connect(self, setup: Setup) -> Communicator:
        """Return a communicator for a group: the one that all of its members have cached, or a new one."""
        # Processes, not names: an engine that was restarted under the same name has no communicator any more.
        members = tuple(repr(setup.group.identities[rank]) for rank in range(setup.group.size))
        with self._lock:
            # Taken out while it is in use: two updates of one process must not share a communicator.
            cached = self._cached.pop(str(setup.device), None)
        # Engines were restarted, or others take part.
        if cached is not None and cached.members != members:
            self._end(cached.handle)
            cached = None
        shared = False
        try:
            shared = self._all_have(cached, setup)
        finally:
            # Whatever ended the exchange: a communicator that one member has given up cannot be used by the others.
            if cached is not None and not shared:
                self._end(cached.handle)
        if cached is not None and shared:
            return cached
        return Communicator(self._make(setup), members, setup.group.name)

    def keep(self, communicator: Communicator, device: Any) -> None:
        """Cache a communicator whose broadcasts have all succeeded."""
        with self._lock:
            before = self._cached.pop(str(device), None)
            self._cached[str(device)] = communicator
        if before is not None:
            self._end(before.handle)

    def discard(self, communicator: Communicator) -> None:
        """Destroy a communicator."""
        self._end(communicator.handle)

    def end_all(self) -> None:
        """Destroy all cached communicators."""
        with self._lock:
            cached = list(self._cached.values())
            self._cached.clear()
        for communicator in cached:
            self._end(communicator.handle)

    def _all_have(self, cached: Communicator | None, setup: Setup) -> bool:
        """Exchange what the members have cached, also if this one has nothing: the others wait for its report."""
        # The number of broadcasts is a part of the state: a member that missed one would receive everything shifted.
        state = "none" if cached is None else cached.state
        setup.group.acknowledge("communicator", state)
        states = setup.group.await_receivers("communicator", setup.timeout_s, range(setup.group.size))
        return {*states} == {state} and cached is not None


class CommunicatorTransport:
    """Transport with one broadcast of a cached communicator for each bucket, and messages between two members.

    Subclasses connect, in their constructors.

    Attributes:
        name: name of the transport, for messages.
        communicators: cache of communicators of its kind.
    """

    name: ClassVar[str]
    communicators: ClassVar[Communicators]

    def __init__(self, setup: Setup) -> None:
        self._group, self._device = setup.group, setup.device
        self._in_flight: list[DeviceWork | ThreadWork] = []
        self._communicator: Communicator | None = None
        self._healthy = True

    def _queue(self) -> AbstractContextManager[Any]:
        """Return a context in which broadcasts go to this transport's device and stream."""
        return contextlib.nullcontext()

    def _backend(self, communicator: Communicator) -> Any:
        """Return torch's object that broadcasts."""
        return communicator.handle

    def send(self, buffer: torch.Tensor) -> DeviceWork:
        return self._begin(buffer)

    def receive(self, buffer: torch.Tensor) -> DeviceWork:
        self._before_receive()
        return self._begin(buffer)

    def send_to(self, buffer: torch.Tensor, peer: int) -> DeviceWork | ThreadWork:
        return self._exchange("send", buffer, peer)

    def receive_from(self, buffer: torch.Tensor, peer: int) -> DeviceWork | ThreadWork:
        self._before_receive()
        return self._exchange("recv", buffer, peer)

    def _before_receive(self) -> None:
        """Make the transport's stream wait for kernels that still use the buffer's memory."""

    def _start(self, backend: Any, call: str, buffer: torch.Tensor, peer: int) -> Any:
        """Start to send or receive a message; return the library's handle."""
        return getattr(backend, call)([buffer], peer, 0)

    def _exchange(self, call: str, buffer: torch.Tensor, peer: int) -> DeviceWork | ThreadWork:
        if self._communicator is None:
            raise TransportError(f"{self.name}: closed")
        try:
            with self._queue():
                handle = self._start(self._backend(self._communicator), call, buffer, peer)
        except RuntimeError as error:
            raise TransportError(f"{self.name}: {first_line(error)}") from error
        return tracked(self._in_flight, self._work(handle, buffer))

    def _work(self, handle: Any, buffer: torch.Tensor) -> DeviceWork | ThreadWork:
        """Wrap the library's handle of a message."""
        return DeviceWork(handle, buffer, self._group, self.name)

    def _first_broadcast(self, setup: Setup) -> None:
        """Make the library connect, and check that bytes arrive. A communicator that is used again has shown that they do."""
        if self._communicator is not None and self._communicator.broadcasts:
            return
        first = torch.full((8,), 1 if setup.group.rank == 0 else 0, dtype=torch.uint8, device=setup.device)
        # The fill runs on the current stream, the broadcast on the transport's own, which does not wait for it.
        torch.get_device_module(setup.device).current_stream(setup.device).synchronize()
        self._begin(first).wait(setup.timeout_s)
        if first.tolist() != [1] * 8:
            raise TransportError(f"{self.name}: the first broadcast has brought nothing")

    def _begin(self, buffer: torch.Tensor) -> DeviceWork:
        if self._communicator is None:
            raise TransportError(f"{self.name}: closed")
        self._communicator.broadcasts += 1
        try:
            with self._queue():
                handle = self._backend(self._communicator).broadcast([buffer], self._broadcast_options())
        except RuntimeError as error:
            raise TransportError(f"{self.name}: {first_line(error)}") from error
        return tracked(self._in_flight, DeviceWork(handle, buffer, self._group, self.name))

    def _broadcast_options(self) -> BroadcastOptions:
        options = BroadcastOptions()
        # The rank within this group, whose sender is always 0; the trainer's own global rank plays no part.
        options.rootRank = 0
        return options

    def close(self) -> None:
        """Cache the communicator for the next update if everything succeeded, otherwise destroy it."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if self._healthy and all(work.ended for work in self._in_flight):
            self.communicators.keep(communicator, self._device)
        else:
            self.communicators.discard(communicator)
        self._in_flight = []
