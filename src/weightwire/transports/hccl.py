"""Transport between Ascend NPUs: an HCCL communicator per group, created without a default group, through torch_npu.

Every call is made on the thread that uses the transport: HCCL's broadcasts have failed on other threads. HCCL creates
a communicator at its first broadcast, on all members at once, with its own deadline (``HCCL_CONNECT_TIMEOUT``, 120 s
by default).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightwire.errors import TransportError
from weightwire.transports.base import Setup, ThreadWork, first_line
from weightwire.transports.communicators import Communicator, Communicators, CommunicatorTransport


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


class HcclTransport(CommunicatorTransport):
    """Transport with one HCCL broadcast for each bucket. The constructor creates a communicator unless one is cached."""

    name = "hccl"
    communicators = COMMUNICATORS

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        try:
            self._communicator = COMMUNICATORS.connect(setup)
        except (ImportError, RuntimeError) as error:
            raise TransportError(f"hccl: no process group could be made: {first_line(error)}") from error
        try:
            self._first_broadcast(setup)
        except TransportError:
            self.abort()
            self.close()
            raise

    def _queue(self) -> AbstractContextManager[Any]:
        return torch.get_device_module(self._device).device(self._device)

    def _work(self, handle: Any, buffer: torch.Tensor) -> ThreadWork:
        npu = torch.get_device_module(self._device)
        stream = npu.Stream(self._device)

        def wait() -> None:
            # The handle's wait only makes a stream wait; that stream is then waited for.
            with npu.device(self._device), npu.stream(stream):
                handle.wait()
                stream.synchronize()

        return ThreadWork(wait, buffer, self._group, self.name)

    def _backend(self, communicator: Communicator) -> Any:
        return communicator.handle[0]

    def abort(self) -> None:
        """Abort the communicator if a broadcast is in flight."""
        self._healthy = False
        if self._communicator is not None and any(not work.ended for work in self._in_flight):
            # A communicator that is already in error may refuse to be aborted; the next update creates a new one.
            with contextlib.suppress(RuntimeError):
                # Not abort() of the group or the backend, which is c10d's empty one: torch_npu does not override it.
                self._communicator.handle[1].abort_hccl_comm("a weight update was given up")
