"""Transport over TCP, which works between any processes: a Gloo process group without a default group."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from weightwire.errors import TransportError
from weightwire.transports.base import POLL_S, DeviceWork, Setup, ThreadWork, first_line, tracked


class GlooTransport:
    """Transport with one Gloo broadcast for each bucket, and messages between two members, in CPU memory.

    Options: ``threads``, number of Gloo's threads in each member (default 2).
    """

    def __init__(self, setup: Setup) -> None:
        self._group, self._timeout_s = setup.group, setup.timeout_s
        self._in_flight: list[DeviceWork | ThreadWork] = []
        options = ProcessGroupGloo._Options()  # type: ignore[reportAttributeAccessIssue]  not in torch's stubs
        try:
            # By default Gloo takes the address of the host's name, which may be one that only this host reaches.
            options._devices = [ProcessGroupGloo.create_device(hostname=_local_address(setup.group.host))]
            options._timeout = timedelta(seconds=setup.timeout_s)
            options._threads = int(setup.options.get("threads", 2))
            # A connection of its own: Gloo's threads block in it, and heartbeats must not wait for them.
            store = setup.group.store("transport", setup.timeout_s)
            self._gloo: ProcessGroupGloo | None = ProcessGroupGloo(store, setup.group.rank, setup.group.size, options)
        except RuntimeError as error:
            raise TransportError(f"gloo: the members could not connect: {first_line(error)}") from error

    def send(self, buffer: torch.Tensor) -> DeviceWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._broadcast(buffer)

    def receive(self, buffer: torch.Tensor) -> DeviceWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._broadcast(buffer)

    def send_to(self, buffer: torch.Tensor, peer: int) -> ThreadWork:
        """See :class:`weightwire.transports.base.PairTransport`."""
        return self._exchange("send", buffer, peer)

    def receive_from(self, buffer: torch.Tensor, peer: int) -> ThreadWork:
        """See :class:`weightwire.transports.base.PairTransport`."""
        return self._exchange("recv", buffer, peer)

    def _exchange(self, call: str, buffer: torch.Tensor, peer: int) -> ThreadWork:
        if self._gloo is None:
            raise TransportError("gloo: closed")
        try:
            handle = getattr(self._gloo, call)([buffer], peer, 0)
        except RuntimeError as error:
            raise TransportError(f"gloo: {first_line(error)}") from error
        # Unlike a broadcast's, these handles do not know that they have completed before they are waited for.
        deadline = timedelta(seconds=self._timeout_s)
        return tracked(self._in_flight, ThreadWork(lambda: handle.wait(deadline), buffer, self._group, "gloo"))

    def _broadcast(self, buffer: torch.Tensor) -> DeviceWork:
        if self._gloo is None:
            raise TransportError("gloo: closed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            gloo: Any = self._gloo
            return tracked(self._in_flight, DeviceWork(gloo.broadcast([buffer], options), buffer, self._group, "gloo"))
        except RuntimeError as error:
            raise TransportError(f"gloo: {first_line(error)}") from error

    def abort(self) -> None:
        """Do nothing: Gloo cannot cancel a broadcast; it ends at its deadline, or when the other side closes."""

    def close(self) -> None:
        """Close the connections; with a broadcast in flight, on a thread, since Gloo's destructor waits for its deadline."""
        gloo, self._gloo = self._gloo, None
        if any(not work.ended for work in self._in_flight):
            # The thread holds the last references, so that no destructor waits; a daemon, so that the exit does not either.
            references = (gloo, self._in_flight)
            threading.Thread(
                target=_keep_until_ended, args=references, name="weightwire-gloo-close", daemon=True
            ).start()
        self._in_flight = []


def _keep_until_ended(gloo: ProcessGroupGloo, works: list[DeviceWork | ThreadWork]) -> None:
    while any(not work.ended for work in works):
        time.sleep(POLL_S)


def _local_address(listener: str) -> str:
    """Return the local address of the route to the listener: peers can reach this member there, too."""
    family, kind, _, _, address = socket.getaddrinfo(listener, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]
