"""Transport through shared memory on one machine. It has no name in a file system, so nothing is left behind after a crash."""

from __future__ import annotations

import json
import mmap
import os
import uuid

import torch

from weightwire.errors import TransportError
from weightwire.liveness import Identity
from weightwire.transports.base import DeferredWork, Setup, wait_for_keys

SLOTS = 2
MARK_BYTES = 64


class SharedMemoryTransport:
    """Transport through two slots of the sender's memory, mapped by receivers of the same user on the same machine.

    A slot has the size of the largest bucket. The sender fills the slots in turn, and every receiver reads them; the store
    synchronises access to them. Requires Linux and one pid namespace for all members. It has no options.
    """

    def __init__(self, setup: Setup) -> None:
        self._group, self._started = setup.group, 0
        self._store = setup.group.store("transport", setup.timeout_s)
        self._slots: SharedSlots | None = None
        if setup.group.rank == 0:
            bucket = min(setup.manifest.bucket_bytes, setup.manifest.nbytes)
            self._slots = SharedSlots.create(max(1, bucket if setup.largest is None else setup.largest))
            self._store.set("memory", json.dumps(self._slots.address()))

    def send(self, buffer: torch.Tensor) -> DeferredWork:
        bucket, self._started = self._started, self._started + 1
        work = DeferredWork(lambda timeout_s: self._send(bucket, buffer, timeout_s), f"bucket {bucket + 1}")
        if bucket < SLOTS:
            work.wait(0.0)  # the slot is free: receivers can start before the sender waits
        return work

    def receive(self, buffer: torch.Tensor) -> DeferredWork:
        bucket, self._started = self._started, self._started + 1
        return DeferredWork(lambda timeout_s: self._receive(bucket, buffer, timeout_s), f"bucket {bucket + 1}")

    def abort(self) -> None:
        """Do nothing: transfers happen only within ``wait``."""

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()

    def _send(self, bucket: int, buffer: torch.Tensor, timeout_s: float) -> None:
        if bucket >= SLOTS:
            # The slot's previous bucket must have been read by every receiver before it is overwritten.
            readers = [f"read/{bucket - SLOTS}/{rank}" for rank in range(1, self._group.size)]
            failure = f"bucket {bucket - SLOTS + 1} has not been read"
            wait_for_keys(readers, self._store, self._group, timeout_s, failure)
        assert self._slots is not None
        self._slots.write(bucket, buffer)
        # After the bytes: a receiver that sees the key reads the slot at once.
        self._store.set(f"written/{bucket}", "1")

    def _receive(self, bucket: int, buffer: torch.Tensor, timeout_s: float) -> None:
        failure = f"bucket {bucket + 1} has not been written"
        wait_for_keys([f"written/{bucket}"], self._store, self._group, timeout_s, failure)
        if self._slots is None:
            # Not in the constructor: a receiver that waited there for one sender would keep another one from sending.
            address = json.loads(self._store.get("memory"))
            self._slots = SharedSlots.open(address, self._group.member(0))
        self._slots.read(bucket, buffer)
        # After the copy: the sender that sees the key overwrites the slot.
        self._store.set(f"read/{bucket}/{self._group.rank}", "1")


class SharedSlots:
    """Memory of this process, or of another one, for :data:`SLOTS` buckets, with a random mark in front that identifies it."""

    def __init__(self, descriptor: int, mark: str, slot_bytes: int) -> None:
        self._descriptor, self._mark, self._slot_bytes = descriptor, mark, slot_bytes
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, _size(slot_bytes))
        self._bytes: torch.Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)

    @classmethod
    def create(cls, slot_bytes: int) -> SharedSlots:
        """Allocate new memory."""
        try:
            descriptor = os.memfd_create("weightwire")
            # memfd_create reserves nothing: without room, the first write would end the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, _size(slot_bytes))
        except (AttributeError, OSError) as error:
            raise TransportError(f"cannot allocate {_size(slot_bytes)} bytes of shared memory: {error}") from error
        slots = cls(descriptor, uuid.uuid4().hex, slot_bytes)
        assert slots._memory is not None
        slots._memory[: len(slots._mark)] = slots._mark.encode()
        return slots

    @classmethod
    def open(cls, address: list[object], sender: str) -> SharedSlots:
        """Map the memory at another process's :meth:`address`."""
        space, pid, number, mark, size = address
        slot_bytes = int(str(size))
        if space != Identity.current().space or not space:
            raise TransportError(
                f"shared_memory: {sender} is on another machine, or in a container whose processes are not visible here; "
                "use gloo"
            )
        try:
            # A memfd has no path of its own; processes of the same user can open it here.
            descriptor = os.open(f"/proc/{int(str(pid))}/fd/{int(str(number))}", os.O_RDWR)
        except OSError as error:
            raise TransportError(f"shared_memory: the memory of {sender} cannot be opened: {error}") from error
        if os.fstat(descriptor).st_size != _size(slot_bytes):
            os.close(descriptor)
            raise TransportError(f"shared_memory: the memory of {sender} is not {_size(slot_bytes)} bytes long")
        opened = cls(descriptor, str(mark), slot_bytes)
        assert opened._memory is not None
        # By now the number of process or file may belong to another one, whose memory could have the same size.
        if opened._memory[: len(opened._mark)] != opened._mark.encode():
            opened.close()
            raise TransportError(f"shared_memory: the memory of {sender} does not have the mark of this update")
        return opened

    def address(self) -> list[object]:
        """Return the address by which other processes open the memory."""
        return [Identity.current().space, os.getpid(), self._descriptor, self._mark, self._slot_bytes]

    def write(self, bucket: int, content: torch.Tensor) -> None:
        """Write a bucket into its slot, ``bucket % SLOTS``, which is free."""
        self._slot(bucket, content.numel()).copy_(content)

    def read(self, bucket: int, content: torch.Tensor) -> None:
        """Copy a written bucket into ``content``."""
        content.copy_(self._slot(bucket, content.numel()))

    def _slot(self, bucket: int, nbytes: int) -> torch.Tensor:
        if self._bytes is None:
            raise TransportError("shared_memory: closed")
        if nbytes > self._slot_bytes:
            raise TransportError(f"shared_memory: bucket {bucket + 1} has {nbytes} bytes, a slot {self._slot_bytes}")
        start = MARK_BYTES + bucket % SLOTS * self._slot_bytes
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Close the memory, which the system frees when all members have."""
        if self._memory is not None:
            self._bytes = self._memory = None  # unmapped with the last tensor that views it
            os.close(self._descriptor)


def _size(slot_bytes: int) -> int:
    return MARK_BYTES + SLOTS * slot_bytes
