"""Transport over TCP, which works between any processes: a Gloo process group without a default group."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from weightwire.background import BackgroundThread
from weightwire.errors import TransportError
from weightwire.transports.base import POLL_S, DeviceWork, Setup, ThreadWork, first_line
from weightwire.transports.communicators import Communicator, CommunicatorTransport


class GlooTransport(CommunicatorTransport):
    """Transport in CPU memory: one Gloo broadcast for each bucket, and messages between two members. No connection is cached.

    Options: ``threads``, number of Gloo's threads in each member (default 2).
    """

    name = "gloo"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._deadline = timedelta(seconds=setup.timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[reportAttributeAccessIssue]  not in torch's stubs
        try:
            # By default Gloo takes the address of the host's name, which may be one that only this host reaches.
            options._devices = [ProcessGroupGloo.create_device(hostname=_local_address(setup.group.host))]
            options._timeout = self._deadline
            options._threads = int(setup.options.get("threads", 2))
            # A connection of its own: Gloo's threads block in it, and heartbeats must not wait for them.
            store = setup.group.store("transport", setup.timeout_s)
        except RuntimeError as error:
            raise TransportError(f"gloo: the members could not connect: {first_line(error)}") from error
        groups: list[ProcessGroupGloo] = []
        # On a thread: with a member that is stopped, the constructor returns after five times its timeout.
        connecting = ThreadWork(
            lambda: groups.append(ProcessGroupGloo(store, setup.group.rank, setup.group.size, options)),
            torch.empty(0),
            setup.group,
            self.name,
            "the members have not connected",
        )
        connecting.wait(setup.timeout_s)
        self._communicator = Communicator(groups[0], (), setup.group.name)

    def _broadcast_options(self) -> BroadcastOptions:
        options = super()._broadcast_options()
        options.timeout = self._deadline
        return options

    def _work(self, handle: Any, buffer: torch.Tensor) -> ThreadWork:
        # Unlike a broadcast's, these handles do not know that they have completed before they are waited for.
        deadline = self._deadline
        return ThreadWork(lambda: handle.wait(deadline), buffer, self._group, self.name)

    def abort(self) -> None:
        """Do nothing: Gloo cannot cancel a broadcast; it ends at its deadline, or when the other side closes."""

    def close(self) -> None:
        """Close the connections; with a broadcast in flight, on a thread, since Gloo's destructor waits for its deadline."""
        communicator, self._communicator = self._communicator, None
        if any(not work.ended for work in self._in_flight):
            # The thread holds the last references, so that no destructor waits; a daemon, so that the exit does not either.
            BackgroundThread(_keep_until_ended, communicator, self._in_flight, name="weightwire-gloo-close").start()
        self._in_flight = []


def _keep_until_ended(communicator: Communicator | None, works: list[DeviceWork | ThreadWork]) -> None:
    while any(not work.ended for work in works):
        time.sleep(POLL_S)


def _local_address(listener: str) -> str:
    """Return the local address of the route to the listener: peers can reach this member there, too."""
    family, kind, _, _, address = socket.getaddrinfo(listener, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]
