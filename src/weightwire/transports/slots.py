"""Transport through memory that all members can access: two slots, filled by the sender in turn and read by every receiver.

A medium implements the slots; the store synchronises access to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch.distributed import Store

from weightwire.errors import DeadlineError, TransportError
from weightwire.group import Group

SLOTS = 2


class Medium(Protocol):
    """Memory of the slots."""

    def write(self, bucket: int, content: torch.Tensor) -> None:
        """Write a bucket into its slot, ``bucket % SLOTS``, which is free."""
        ...

    def read(self, bucket: int, content: torch.Tensor) -> None:
        """Copy a written bucket into ``content``."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


class SlotTransport:
    """Transport of buckets through the slots of a medium."""

    def __init__(self, group: Group, store: Store, medium: Medium) -> None:
        self._group, self._store, self._medium = group, store, medium
        self._started = 0

    def send(self, buffer: torch.Tensor) -> SlotWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._work(self._send, buffer)

    def receive(self, buffer: torch.Tensor) -> SlotWork:
        """See :class:`weightwire.transports.base.Transport`."""
        return self._work(self._receive, buffer)

    def abort(self) -> None:
        """Do nothing: transfers happen only within ``wait``."""

    def close(self) -> None:
        """See :class:`weightwire.transports.base.Transport`."""
        self._medium.close()

    def _work(self, transfer: Callable[[int, torch.Tensor, float], None], buffer: torch.Tensor) -> SlotWork:
        bucket, self._started = self._started, self._started + 1
        work = SlotWork(transfer, bucket, buffer)
        if self._group.rank == 0 and bucket < SLOTS:
            work.wait(0.0)  # the slot is free: receivers can start before the sender waits
        return work

    def _send(self, bucket: int, buffer: torch.Tensor, timeout_s: float) -> None:
        if bucket >= SLOTS:
            # The slot's previous bucket must have been read by every receiver before it is overwritten.
            readers = [f"read/{bucket - SLOTS}/{rank}" for rank in range(1, self._group.size)]
            self._wait_for(readers, timeout_s, f"bucket {bucket - SLOTS + 1} has not been read")
        self._medium.write(bucket, buffer)
        # After the bytes: a receiver that sees the key reads the slot at once.
        self._store.set(f"written/{bucket}", "1")

    def _receive(self, bucket: int, buffer: torch.Tensor, timeout_s: float) -> None:
        self._wait_for([f"written/{bucket}"], timeout_s, f"bucket {bucket + 1} has not been written")
        self._medium.read(bucket, buffer)
        # After the copy: the sender that sees the key overwrites the slot.
        self._store.set(f"read/{bucket}/{self._group.rank}", "1")

    def _wait_for(self, keys: list[str], timeout_s: float, failure: str) -> None:
        deadline, pause = time.monotonic() + timeout_s, 0.0002
        # Polled: the store's own wait could not be ended by the loss of a member.
        while not self._store.check(keys):
            self._group.check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"{failure} within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)


class SlotWork:
    """A bucket that is written or read when it is waited for."""

    def __init__(self, transfer: Callable[[int, torch.Tensor, float], None], bucket: int, buffer: torch.Tensor) -> None:
        self._transfer, self._bucket, self._buffer = transfer, bucket, buffer
        self._completed = False

    def wait(self, timeout_s: float) -> None:
        """See :class:`weightwire.transports.base.Work`."""
        # Waited for again by the sender, if the slot was free at once.
        if self._completed:
            return
        try:
            self._transfer(self._bucket, self._buffer, timeout_s)
        except (OSError, RuntimeError) as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"bucket {self._bucket + 1}: {type(error).__name__}: {error}") from error
        self._completed = True
