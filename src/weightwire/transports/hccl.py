"""Transport between Ascend NPUs: an HCCL communicator per group, created without a default group, through torch_npu.

Every call is made on the thread that uses the transport: HCCL's broadcasts have failed on other threads. HCCL creates
a communicator at its first broadcast, on all members at once, with its own deadline (``HCCL_CONNECT_TIMEOUT``, 120 s
by default).
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightwire.errors import TransportError
from weightwire.transports.base import Setup
from weightwire.transports.communicators import Communicator, Communicators
from weightwire.transports.device_work import DeviceWork, first_line


class HcclTransport:
    """Transport with one HCCL broadcast for each bucket. The constructor creates a communicator unless one is cached.

    Raises:
        TransportError: torch_npu is missing, or HCCL could not connect.
    """

    def __init__(self, setup: Setup) -> None:
        self._group, self._device = setup.group, setup.device
        self._under_way: list[DeviceWork] = []
        self._healthy = True
        self._npu: Any = getattr(torch, "npu", None)
        try:
            self._communicator: Communicator | None = COMMUNICATORS.connect(setup)
        except (ImportError, RuntimeError) as error:
            raise TransportError(f"hccl: no process group could be made: {first_line(error)}") from error
        try:
            self._first_broadcast(setup)
        except TransportError:
            self.abort()
            self.close()
            raise

    def send(self, buffer: torch.Tensor) -> DeviceWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._begin(buffer)

    def receive(self, buffer: torch.Tensor) -> DeviceWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._begin(buffer)

    def _first_broadcast(self, setup: Setup) -> None:
        """Make HCCL connect, and check that bytes arrive."""
        first = torch.full((8,), 1 if setup.group.rank == 0 else 0, dtype=torch.uint8, device=setup.device)
        # Transport.send requires that the buffer's values are complete before it is called.
        self._npu.current_stream(setup.device).synchronize()
        self._begin(first).wait(setup.timeout_s)
        if first.tolist() != [1] * 8:
            raise TransportError("hccl: the first broadcast has brought nothing")

    def _begin(self, buffer: torch.Tensor) -> DeviceWork:
        if self._communicator is None:
            raise TransportError("hccl: closed")
        # Counted before the call: members reuse a communicator only if all of them have started equally many.
        self._communicator.broadcasts += 1
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            with self._npu.device(self._device):
                work = DeviceWork(
                    self._communicator.handle[0].broadcast([buffer], options), buffer, self._group, "hccl"
                )
        except RuntimeError as error:
            raise TransportError(f"hccl: {first_line(error)}") from error
        self._under_way = [other for other in self._under_way if not other.ended] + [work]
        return work

    def abort(self) -> None:
        """Abort the communicator if a broadcast is in flight."""
        self._healthy = False
        if self._communicator is not None and any(not work.ended for work in self._under_way):
            with contextlib.suppress(RuntimeError):
                self._communicator.handle[0].abort()

    def close(self) -> None:
        """Cache the communicator for the next update if everything succeeded, otherwise discard it."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if self._healthy and all(work.ended for work in self._under_way):
            COMMUNICATORS.keep(communicator, self._device)
        else:
            COMMUNICATORS.discard(communicator)
        self._under_way = []


def _process_group(setup: Setup) -> tuple[Any, Any]:
    """Create a process group whose only backend is HCCL, on npu tensors; return it and the backend."""
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    rank, size = setup.group.rank, setup.group.size
    store = setup.group.store("transport", setup.timeout_s)
    options = ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=setup.timeout_s)
    group = dist.ProcessGroup(store, rank, size)
    with torch.npu.device(setup.device):  # type: ignore[attr-defined]
        backend = ProcessGroupHCCL(store, rank, size, options)
        # As torch.distributed does for the groups that it creates; this one bypasses it, since it needs no default group.
        backend._set_sequence_number_for_group()
    group._register_backend(torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group, backend


def _end(_handle: Any) -> None:
    """Do nothing: torch_npu destroys a communicator with its last reference."""


COMMUNICATORS = Communicators("hccl", _process_group, _end)
