"""Transport between Ascend NPUs by vllm-ascend's communicator, for systems where torch_npu's process groups cannot be used.

``PyHcclCommunicator`` fails silently: without ``libhccl`` it sets ``disabled``, and its broadcasts return without sending
anything. Such a communicator is refused, and the result of the first broadcast is checked. It needs a group that broadcasts its
unique id; vLLM's own group pickles it, the one here sends the id's bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from weightwire.errors import TransportError
from weightwire.transports.base import DeferredWork, Setup, first_line, wait_until


class VllmHcclTransport:
    """Transport with one broadcast for each bucket, queued on its own stream. Every call is made on the caller's thread.

    Raises:
        TransportError: vllm-ascend is missing, or its communicator is disabled or transferred nothing.
    """

    def __init__(self, setup: Setup) -> None:
        self._group, self._device = setup.group, setup.device
        self._npu: Any = torch.get_device_module(setup.device)
        self._stream = self._npu.Stream(device=setup.device)
        self._communicator: Any = _communicator(setup)
        require_working(self._communicator)
        # Some communicators return from every call without sending anything, so the first bytes are compared.
        first = torch.full((8,), 1 if setup.group.rank == 0 else 0, dtype=torch.uint8, device=setup.device)
        self._npu.current_stream(setup.device).synchronize()
        self._begin(first).wait(setup.timeout_s)
        if first.tolist() != [1] * 8:
            raise TransportError("vllm_hccl: a broadcast returned, and nothing had been received")

    def send(self, buffer: torch.Tensor) -> DeferredWork:
        return self._begin(buffer)

    def receive(self, buffer: torch.Tensor) -> DeferredWork:
        # The buffer is overwritten: work that still reads its last content must come first.
        self._stream.wait_stream(self._npu.current_stream(self._device))
        return self._begin(buffer)

    def _begin(self, buffer: torch.Tensor) -> DeferredWork:
        if self._communicator is None:
            raise TransportError("vllm_hccl: closed")
        require_working(self._communicator)
        copied = self._npu.Event()
        try:
            with self._npu.device(self._device), self._npu.stream(self._stream):
                self._communicator.broadcast(buffer, src=0, stream=self._stream)
                copied.record(self._stream)
        except (RuntimeError, AssertionError) as error:
            raise TransportError(f"vllm_hccl: {first_line(error)}") from error
        failure = "vllm_hccl: a bucket has not travelled"
        return DeferredWork(
            lambda timeout_s: wait_until(copied.query, self._group, timeout_s, failure), "vllm_hccl", buffer
        )

    def abort(self) -> None:
        """Do nothing: vllm-ascend's communicator cannot cancel a broadcast."""

    def close(self) -> None:
        """Release the communicator."""
        communicator, self._communicator = self._communicator, None
        if hasattr(communicator, "close"):  # from vllm-ascend's main of 2026 on
            communicator.close()


def require_working(communicator: Any) -> None:
    """Raise TransportError for a ``PyHcclCommunicator`` whose calls return without doing anything."""
    available, disabled = communicator.available, communicator.disabled
    if disabled or not available:
        raise TransportError(
            f"vllm_hccl: vllm-ascend's PyHcclCommunicator is {'disabled' if disabled else 'not available'}: it could not load "
            "libhccl.so and would send nothing; source CANN's set_env.sh, or set HCCL_SO_PATH"
        )


def _communicator(setup: Setup) -> Any:
    try:
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator
    except ImportError as error:
        raise TransportError(f"vllm_hccl: vllm-ascend is not installed here: {error}") from error

    class Members(StatelessProcessGroup):
        """The parts of a process group that the communicator uses: rank, size, and a broadcast of rank 0's unique id."""

        def __init__(self) -> None:
            self.rank, self.world_size = setup.group.rank, setup.group.size
            self.store = setup.group.store("transport", setup.timeout_s)

        def broadcast_obj(self, obj: Any, src: int) -> Any:
            # vLLM's own method pickles objects into the store, and nothing that comes from a socket is unpickled here.
            if not isinstance(obj, ctypes.Structure):
                raise TransportError(f"vllm_hccl: a {type(obj).__name__} was to be sent; only HCCL's unique id is")
            if self.rank == src:
                self.store.set("unique id", bytes(obj).hex())
                return obj
            content = bytes.fromhex(self.store.get("unique id").decode())
            if len(content) != ctypes.sizeof(obj):
                raise TransportError(
                    f"vllm_hccl: a unique id of {len(content)} bytes came, and this HCCL's has {ctypes.sizeof(obj)}"
                )
            return type(obj).from_buffer_copy(content)

    try:
        return PyHcclCommunicator(group=Members(), device=setup.device)
    except (RuntimeError, OSError) as error:
        raise TransportError(f"vllm_hccl: the members could not connect: {first_line(error)}") from error
