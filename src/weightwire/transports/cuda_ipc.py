"""Transport on one host, between processes that share CUDA devices: receivers copy from the sender's buffers.

Only handles go through the group's store, as JSON and base64; nothing is unpickled. Receivers map the sender's
allocation, copy the bucket on the device (or over NVLink to their own), and acknowledge it; then the sender may
overwrite it.

PyTorch's sharing of CUDA memory requires the same user and IPC namespace (``/dev/shm`` holds the reference counts),
the sender's device visible to the receiver, and ``PYTORCH_CUDA_ALLOC_CONF`` without ``expandable_segments`` on the
sender. A receiver that dies without closing leaves the sender's buffers allocated until the sender ends.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

import torch

from weightwire.errors import TransportError
from weightwire.transports.base import DeferredWork, Setup, first_line, wait_for_keys, wait_until
from weightwire.transports.choice import gpu_uuid

HANDLE_FIELDS = ("memory", "size", "offset", "counter", "counter_offset", "event", "wait_for_event")
"""Fields of PyTorch's handle of a shared allocation, after the device, in its order."""


class CudaIpcTransport:
    """Transport by CUDA IPC: the sender publishes the address of a bucket; each receiver copies it and acknowledges."""

    def __init__(self, setup: Setup) -> None:
        self._group, self._device = setup.group, setup.device
        self._rank, self._size = setup.group.rank, setup.group.size
        self._store = setup.group.store("transport", setup.timeout_s)
        self._stream = torch.cuda.Stream(setup.device)
        self._count = 0
        self._shared: dict[int, tuple[int, torch.UntypedStorage]] = {}  # sender's: by address
        self._opened: dict[int, torch.Tensor] = {}  # a receiver's: by the sender's number
        self._pending: list[IncomingBucket] = []
        self._source: torch.device | None = None  # a receiver's: the sender's device
        if self._rank == 0:
            self._store.set("device", gpu_uuid(setup.device))

    def send(self, buffer: torch.Tensor) -> DeferredWork:
        number = self._take_number()
        storage = buffer.untyped_storage()
        message = json.dumps([self._publish(storage), buffer.storage_offset() * buffer.element_size(), buffer.nbytes])
        # Offset and size, as allocations are shared whole: buckets are slices of few allocations, which are mapped once each.
        self._store.set(f"bucket/{number}", message)
        taken = [f"taken/{number}/{rank}" for rank in range(1, self._size)]
        failure = f"cuda_ipc: not all receivers have copied bucket {number}"
        return DeferredWork(
            lambda timeout_s: wait_for_keys(taken, self._store, self._group, timeout_s, failure), "cuda_ipc", buffer
        )

    def receive(self, buffer: torch.Tensor) -> IncomingBucket:
        # The buffer's memory may have been another tensor's, whose last kernels are still to run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._pending.append(IncomingBucket(self, self._take_number(), buffer))
        return self._pending[-1]

    def offered(self, number: int) -> bool:
        """Check whether the sender has published bucket ``number``."""
        return self._store.check([f"bucket/{number}"])

    def begin_copy(self, number: int, buffer: torch.Tensor) -> torch.cuda.Event:
        """Queue the copy of a published bucket; return an event that follows it."""
        storage, offset, length = _numbers(self._store.get(f"bucket/{number}"), 3)
        source = self._open(storage)
        # The store is not authenticated: a wrong range would read beyond the mapped allocation, on the device and silently.
        if length != buffer.nbytes or offset < 0 or offset + length > source.nbytes:
            raise TransportError(
                f"cuda_ipc: bucket {number} is offered as bytes {offset} to {offset + length} of {source.nbytes}, and "
                f"{buffer.nbytes} bytes are expected"
            )
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            buffer.copy_(source[offset : offset + length], non_blocking=True)
            copied.record(self._stream)
        return copied

    def finish(self, bucket: IncomingBucket, timeout_s: float) -> None:
        """Wait for the oldest bucket, acknowledge it, and start the next copy if that bucket is published already."""
        number, activity = bucket.number, f"cuda_ipc: bucket {bucket.number}"
        if bucket.copied is None:
            wait_until(lambda: self.offered(number), self._group, timeout_s, f"{activity} has not been offered")
            bucket.copied = self.begin_copy(number, bucket.buffer)
        # Polled, not synchronized: a wait for the device could not be ended when the sender is lost.
        wait_until(bucket.copied.query, self._group, timeout_s, f"{activity} has not been copied")
        # Only after the copy: from here on the sender may overwrite the buffer.
        self._store.set(f"taken/{number}/{self._rank}", "1")
        self._pending.remove(bucket)
        if self._pending and self._pending[0].copied is None and self.offered(self._pending[0].number):
            self._pending[0].copied = self.begin_copy(self._pending[0].number, self._pending[0].buffer)

    def abort(self) -> None:
        """Do nothing: a copy cannot block."""

    def close(self) -> None:
        """Unmap the sender's memory."""
        self._pending.clear()
        self._opened.clear()
        self._shared.clear()
        # Lets torch return memory whose last receiver has unmapped it.
        torch.cuda.ipc_collect()

    def _take_number(self) -> int:
        self._count += 1
        return self._count - 1

    def _publish(self, storage: torch.UntypedStorage) -> int:
        """Return an allocation's number, under which its handle is in the store."""
        if storage.data_ptr() not in self._shared:
            try:
                _device, *values = storage._share_cuda_()
            except RuntimeError as error:
                raise TransportError(f"cuda_ipc: the buffer cannot be shared: {first_line(error)}") from error
            number = len(self._shared)
            self._store.set(f"storage/{number}", json.dumps(dict(zip(HANDLE_FIELDS, map(_text, values), strict=True))))
            self._shared[storage.data_ptr()] = number, storage  # kept alive: no other allocation gets its address
        return self._shared[storage.data_ptr()][0]

    def _open(self, number: int) -> torch.Tensor:
        """Map the sender's allocation ``number``; return its bytes."""
        if self._source is None:
            # Not in the constructor: a receiver that waited there for one sender would keep another one from sending.
            self._source = _device_of(self._store.get("device").decode())
        if number not in self._opened:
            values = _handle(self._store.get(f"storage/{number}"))
            try:
                with torch.cuda.device(self._source):
                    storage = torch.UntypedStorage._new_shared_cuda(self._source.index, *values)
            except RuntimeError as error:
                raise TransportError(f"cuda_ipc: the sender's memory cannot be mapped: {first_line(error)}") from error
            mapped = torch.empty(0, dtype=torch.uint8, device=self._source)
            self._opened[number] = mapped.set_(storage)  # type: ignore[reportCallIssue]
        return self._opened[number]


class IncomingBucket:
    """A bucket to copy. Waits happen in order.

    Attributes:
        number: index of the bucket.
        buffer: the destination.
        copied: event after the copy; None if it has not started.
    """

    def __init__(self, transport: CudaIpcTransport, number: int, buffer: torch.Tensor) -> None:
        self._transport, self.number, self.buffer = transport, number, buffer
        self.copied: torch.cuda.Event | None = None

    def wait(self, timeout_s: float) -> None:
        try:
            self._transport.finish(self, timeout_s)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"cuda_ipc: {first_line(error)}") from error


def _device_of(uuid: str) -> torch.device:
    """Return the device with this UUID, as this process numbers it."""
    uuids = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in uuids:
        raise TransportError(
            f"cuda_ipc: the sender's buffers are on GPU {uuid:.60}, and this process sees {', '.join(uuids) or 'none'}: "
            "they must be on one host, and CUDA_VISIBLE_DEVICES must include it"
        )
    return torch.device("cuda", uuids.index(uuid))


def _text(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _handle(text: bytes) -> list[Any]:
    """Parse the values of :data:`HANDLE_FIELDS`."""
    kinds = (str, int, int, str, int, str, bool)
    try:
        fields = json.loads(text)
        values = [fields[name] for name in HANDLE_FIELDS]
        # The store is not authenticated, and these values are passed to PyTorch's C++ code.
        if len(fields) != len(kinds) or [type(value) for value in values] != list(kinds):
            raise ValueError("fields of other types")
        return [base64.b64decode(value, validate=True) if isinstance(value, str) else value for value in values]
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise TransportError(f"cuda_ipc: the store holds no handle of an allocation: {error}") from error


def _numbers(text: bytes, count: int) -> list[int]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or len(values) != count or any(type(value) is not int for value in values):
        raise TransportError(f"cuda_ipc: the store holds {text!r:.80}, which is no bucket")
    return values
