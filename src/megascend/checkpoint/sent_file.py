"""A file that is digested, and on its way to the disk, while it is written from front to back."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from megascend.files import begin_writing_back

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE = 16 * 2**20
"""Bytes that the disk is given at a time."""


class SentFile(io.BufferedWriter):
    """A new file, or what replaces one.

    Read back for its digest, a file is gone over once more; and one that the disk hears of only at its end, by ``fsync``, takes
    as long again as it took to write.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened for writing.
        """
        super().__init__(io.FileIO(path, "wb"))
        self.size = 0
        self._hash = xxhash.xxh3_128()
        self._sent = 0

    def write(self, buffer: ReadableBuffer, /) -> int:
        """Write all of ``buffer``.

        Returns:
            its bytes.

        Raises:
            OSError: it cannot be written.
        """
        data = memoryview(buffer).cast("B")
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            super().write(piece)
            self._hash.update(piece)
            self.size += len(piece)
            if self.size - self._sent >= PIECE:
                self._send()
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """
        Raises:
            io.UnsupportedOperation: always: what has been digested stays as it is.
        """
        raise io.UnsupportedOperation("a file that is digested while it is written cannot be gone back in")

    def truncate(self, size: int | None = None, /) -> int:
        """
        Raises:
            io.UnsupportedOperation: always, as :meth:`seek`.
        """
        raise io.UnsupportedOperation("a file that is digested while it is written cannot be shortened")

    @property
    def digest(self) -> str:
        """xxh3 (128 bits, hexadecimal) of what has been written so far."""
        return self._hash.hexdigest()

    def _send(self) -> None:
        self.flush()
        begin_writing_back(self.fileno(), self._sent, self.size - self._sent)
        self._sent = self.size
