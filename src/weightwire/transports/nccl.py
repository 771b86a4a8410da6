"""Transport between CUDA devices: a NCCL communicator per group, created without a default group.

Buckets are sent on a stream of their own. PyTorch's watchdog is configured to leave errors and timeouts to us: by
default it ends the process, which would be the inference engine. A broadcast whose peer is gone is ended by the timed
wait of its work, which aborts the communicator: the device's streams and the process continue.

The store of the group must outlive the transport, otherwise the watchdog's thread logs errors at length.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightwire.background import BackgroundThread
from weightwire.errors import TransportError, WireError
from weightwire.transports.base import DeviceWork, Setup, first_line, wait_until
from weightwire.transports.communicators import Communicators, CommunicatorTransport

log = logging.getLogger(__name__)

WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else a timeout ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a watchdog that hangs ends the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # a failed watchdog sleeps four times as long, and abort() waits for it
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Variables that PyTorch reads when a process group is created; set only for that time."""
CLOSE_S = 5.0
"""Longest time that the exit of the process waits for NCCL to destroy communicators, in seconds."""
_environment = threading.Lock()
_ending: list[threading.Thread] = []


def _process_group(setup: Setup) -> Any:
    """Create a ``ProcessGroupNCCL`` outside any default group, whose watchdog does not end the process."""
    timeout = timedelta(seconds=setup.timeout_s)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    store = setup.group.store("transport", setup.timeout_s)
    with torch.cuda.device(setup.device), _variables(WATCHDOG):
        return dist.ProcessGroupNCCL(store, setup.group.rank, setup.group.size, options)


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which C++ reads, and restore their values at the end."""
    with _environment:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


# On a thread: an abort may take long when a peer is gone, and the next update should not wait for it.
def _end(pg: Any) -> None:
    """Abort a communicator on a thread; only the exit of the process waits for it, for :data:`CLOSE_S` at most."""
    thread = BackgroundThread(_abort, pg, name="weightwire-nccl-end")
    thread.start()
    _ending[:] = [other for other in _ending if other.is_alive()] + [thread]


def _abort(pg: Any) -> None:
    try:
        pg.abort()  # unlike shutdown, it does not involve the other members
    except RuntimeError as error:
        log.debug("NCCL did not abort a communicator: %s", error)


# Bounded: aborting a communicator whose peer is lost may not return.
@atexit.register
def _end_with_the_process() -> None:
    until = time.monotonic() + CLOSE_S
    COMMUNICATORS.end_all()
    for thread in _ending:
        thread.join(max(0.0, until - time.monotonic()))


COMMUNICATORS = Communicators("nccl", _process_group, _end)


class NcclTransport(CommunicatorTransport):
    """Transport with one NCCL broadcast for each bucket.

    The constructor creates a communicator unless one is cached, which takes a fraction of a second, and checks it with a
    broadcast of 8 bytes.
    """

    name = "nccl"
    receives_in_flight = 64
    """Queued at once: an engine's thread that has to wake up for each bucket waits for the interpreter's lock each time."""
    communicators = COMMUNICATORS

    def __init__(self, setup: Setup) -> None:
        if not dist.is_nccl_available():
            raise TransportError("nccl: this PyTorch is built without NCCL")
        super().__init__(setup)
        self._stream = torch.cuda.Stream(setup.device)
        failed: list[BaseException] = []

        def connect() -> None:
            self._communicator = COMMUNICATORS.connect(setup)
            self._first_broadcast(setup)

        # The call that creates a communicator blocks until all members are in it: on a thread, which can be abandoned.
        thread = BackgroundThread(connect, name="weightwire-nccl-connect", on_error=failed.append)
        thread.start()
        wait_until(
            lambda: not thread.is_alive(), self._group, setup.timeout_s, "nccl: the communicator has not been made"
        )
        if failed:
            self.abort()
            self.close()
            if isinstance(failed[0], WireError):
                raise failed[0]
            raise TransportError(f"nccl: the members could not connect: {first_line(failed[0])}") from failed[0]

    @contextlib.contextmanager
    def _queue(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _start(self, backend: Any, call: str, buffer: torch.Tensor, peer: int) -> Any:
        # Coalesced, though it is one message: otherwise PyTorch creates a communicator for each pair of members.
        backend._start_coalescing()
        getattr(backend, call)([buffer], peer, 0)
        return backend._end_coalescing()

    def _before_receive(self) -> None:
        # The buffer's memory may have been another tensor's, whose last kernels are still to run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def abort(self) -> None:
        """Abort the communicator, so that none of its kernels occupies the device."""
        self._healthy = False
        for work in self._in_flight:
            if isinstance(work, DeviceWork):
                work.give_up()
