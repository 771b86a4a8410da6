"""Tensors on their way into files: copied off the device, written and sent to the disk at the same time."""

from __future__ import annotations

import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from megascend.io.hashing import begin_writing_back

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 32 * 2**20
"""Bytes that are copied and written in one go."""
PIECES = 6
"""In memory at one time."""
THREADS = 2
"""A file is written by one thread at a time: its file system locks it. A second one sends pieces to the disk meanwhile."""


class PipelinedWriter:
    """Writes tensors to places in files, from a few pieces of host memory that are used again and again.

    Memory of a tensor is free as soon as :meth:`write` returns. What fails is raised by a later call, at the latest by
    :meth:`wait`. One thread calls.

    Memory that is taken anew for each tensor costs a page fault every 4 KiB, of a Qwen3-4B two million; and a file that is
    sent to the disk only at its end takes as long again as it took to write.
    """

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._made = 0
        self._running: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="megascend-write")

    def write(self, descriptor: int, offset: int, data: Tensor) -> None:
        """Write ``data`` at ``offset`` of an open file.

        Args:
            data: uint8 [bytes], contiguous, on any device.

        Raises:
            OSError: of what was written before.
        """
        for start in range(0, data.numel(), PIECE):
            self._raise_what_failed()
            part = data[start : start + PIECE]
            piece = self._piece(page_locked=part.is_cuda)
            piece[: part.numel()].copy_(part)
            self._running.append(self._pool.submit(self._put, descriptor, offset + start, piece, part.numel()))

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            OSError: something was not.
        """
        running, self._running = self._running, []
        for future in running:
            future.result()

    def close(self) -> None:
        """Wait for what is being written, whatever becomes of it; the writer is of no use afterwards."""
        self._pool.shutdown(cancel_futures=True)

    def _raise_what_failed(self) -> None:
        while self._running and self._running[0].done():
            self._running.pop(0).result()

    def _piece(self, *, page_locked: bool) -> Tensor:
        import torch

        if self._made < PIECES and self._free.empty():
            self._made += 1
            return torch.empty(PIECE, dtype=torch.uint8, pin_memory=page_locked)
        return self._free.get()

    def _put(self, descriptor: int, offset: int, piece: Tensor, count: int) -> None:
        try:
            view = piece.numpy().data[:count]
            written = 0
            while written < count:
                written += os.pwrite(descriptor, view[written:], offset + written)
        finally:
            self._free.put(piece)
        begin_writing_back(descriptor, offset, count)
