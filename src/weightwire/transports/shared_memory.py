"""Through memory that processes of one machine share. It has no name in any file system, so nothing is left of it."""

from __future__ import annotations

import json
import mmap
import os
import time
import uuid
from datetime import timedelta

import torch

from weightwire.errors import DeadlineError, TransportError
from weightwire.liveness import Identity
from weightwire.transports.base import Setup
from weightwire.transports.slots import SLOTS, SlotTransport

MARK_BYTES = 64


class SharedMemoryTransport(SlotTransport):
    """Two buckets of memory of the sender's, which receivers of the same user on the same machine map.

    Linux; the members see each other's processes (one namespace of process ids). It has no options.
    """

    def __init__(self, setup: Setup) -> None:
        store = setup.group.store("transport", setup.timeout_s)
        slot_bytes = max(1, min(setup.manifest.bucket_bytes, setup.manifest.nbytes))
        if setup.group.rank == 0:
            medium = SharedSlots.create(slot_bytes)
            store.set("memory", json.dumps(medium.place()))
        else:
            deadline = time.monotonic() + setup.timeout_s
            while not store.check(["memory"]):
                setup.group.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the sender has not made shared memory within {setup.timeout_s:g} s")
                time.sleep(0.002)
            store.set_timeout(timedelta(seconds=setup.timeout_s))
            medium = SharedSlots.open(json.loads(store.get("memory")), slot_bytes, setup.group.member(0))
        super().__init__(setup.group, store, medium)


class SharedSlots:
    """Memory of this process, or of another one, for :data:`SLOTS` buckets, and a mark in front of them to know it by."""

    def __init__(self, descriptor: int, mark: str, slot_bytes: int) -> None:
        self._descriptor, self._mark, self._slot_bytes = descriptor, mark, slot_bytes
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, _size(slot_bytes))
        self._bytes: torch.Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)

    @classmethod
    def create(cls, slot_bytes: int) -> SharedSlots:
        """New memory."""
        try:
            descriptor = os.memfd_create("weightwire")
            os.posix_fallocate(descriptor, 0, _size(slot_bytes))
        except (AttributeError, OSError) as error:
            raise TransportError(f"no {_size(slot_bytes)} bytes of shared memory: {error}") from error
        made = cls(descriptor, uuid.uuid4().hex, slot_bytes)
        assert made._memory is not None
        made._memory[: len(made._mark)] = made._mark.encode()
        return made

    @classmethod
    def open(cls, place: list[object], slot_bytes: int, sender: str) -> SharedSlots:
        """The memory of :meth:`place`.

        Raises:
            TransportError: it cannot be reached from this process.
        """
        space, pid, number, mark = place
        if space != Identity.mine().space or not space:
            raise TransportError(
                f"shared_memory: {sender} is on another machine, or in a container whose processes are not seen from here; "
                "use gloo"
            )
        try:
            descriptor = os.open(f"/proc/{int(str(pid))}/fd/{int(str(number))}", os.O_RDWR)
        except OSError as error:
            raise TransportError(f"shared_memory: the memory of {sender} cannot be opened: {error}") from error
        if os.fstat(descriptor).st_size != _size(slot_bytes):
            os.close(descriptor)
            raise TransportError(f"shared_memory: what {sender} has there is not {_size(slot_bytes)} bytes long")
        opened = cls(descriptor, str(mark), slot_bytes)
        assert opened._memory is not None
        if opened._memory[: len(opened._mark)] != opened._mark.encode():
            opened.close()
            raise TransportError(f"shared_memory: what {sender} has there is not marked as the memory of this update")
        return opened

    def place(self) -> list[object]:
        """Where others find it."""
        return [Identity.mine().space, os.getpid(), self._descriptor, self._mark]

    def write(self, bucket: int, content: torch.Tensor) -> None:
        """See :class:`weightwire.transports.slots.Medium`."""
        self._slot(bucket)[: content.numel()].copy_(content)

    def read(self, bucket: int, content: torch.Tensor) -> None:
        """See :class:`weightwire.transports.slots.Medium`."""
        content.copy_(self._slot(bucket)[: content.numel()])

    def _slot(self, bucket: int) -> torch.Tensor:
        if self._bytes is None:
            raise TransportError("shared_memory: closed")
        start = MARK_BYTES + bucket % SLOTS * self._slot_bytes
        return self._bytes[start : start + self._slot_bytes]

    def close(self) -> None:
        """Give the memory back, when all members have."""
        if self._memory is not None:
            self._bytes = self._memory = None  # unmapped with the last tensor that looks at it
            os.close(self._descriptor)


def _size(slot_bytes: int) -> int:
    return MARK_BYTES + SLOTS * slot_bytes
