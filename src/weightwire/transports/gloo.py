"""Transport over TCP, which works between any processes: a Gloo process group without a default group."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from weightwire.errors import DeadlineError, TransportError
from weightwire.group import Group
from weightwire.transports.base import POLL_S, Setup
from weightwire.transports.device_work import first_line


class GlooTransport:
    """Transport with one Gloo broadcast for each bucket, in CPU memory.

    Options: ``threads``, number of Gloo's threads in each member (default 2).
    """

    def __init__(self, setup: Setup) -> None:
        self._group, self._timeout_s = setup.group, setup.timeout_s
        self._in_flight: list[GlooWork] = []
        options = ProcessGroupGloo._Options()  # type: ignore[reportAttributeAccessIssue]  not in torch's stubs
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=_local_address(setup.group.host))]
            options._timeout = timedelta(seconds=setup.timeout_s)
            options._threads = int(setup.options.get("threads", 2))
            store = setup.group.store("transport", setup.timeout_s)
            self._gloo: ProcessGroupGloo | None = ProcessGroupGloo(store, setup.group.rank, setup.group.size, options)
        except RuntimeError as error:
            raise TransportError(f"gloo: the members could not connect: {first_line(error)}") from error

    def send(self, buffer: torch.Tensor) -> GlooWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._broadcast(buffer)

    def receive(self, buffer: torch.Tensor) -> GlooWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._broadcast(buffer)

    def _broadcast(self, buffer: torch.Tensor) -> GlooWork:
        if self._gloo is None:
            raise TransportError("gloo: closed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            gloo: Any = self._gloo
            work = GlooWork(gloo.broadcast([buffer], options), self._group)
        except RuntimeError as error:
            raise TransportError(f"gloo: {first_line(error)}") from error
        self._in_flight = [work for work in self._in_flight if not work.ended] + [work]
        return work

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


class GlooWork:
    """A broadcast in flight."""

    def __init__(self, work: torch.distributed.Work, group: Group) -> None:
        self._work, self._group = work, group

    @property
    def ended(self) -> bool:
        """Check whether the broadcast has completed or failed."""
        return self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """See :class:`weightwire.transports.base.Work`."""
        deadline = time.monotonic() + timeout_s
        while not self._work.is_completed():
            self._group.check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"gloo: a bucket has not travelled within {timeout_s:g} s")
            try:
                self._work.wait(timedelta(seconds=min(left, POLL_S)))
            except RuntimeError as error:
                if "Operation timed out!" not in str(error):
                    raise TransportError(f"gloo: {first_line(error)}") from error
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(f"gloo: {first_line(error)}") from error


def _keep_until_ended(gloo: ProcessGroupGloo, works: list[GlooWork]) -> None:
    while any(not work.ended for work in works):
        time.sleep(POLL_S)


def _local_address(listener: str) -> str:
    """Return the local address of the route to the listener: peers can reach this member there, too."""
    family, kind, _, _, address = socket.getaddrinfo(listener, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]
