"""Digests of values and of files, also while they are being written."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE = 16 * 2**20
"""Bytes after which write-back to the disk is started."""


class Hash(Protocol):
    """A hash of hashlib or xxhash."""

    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def digest(file: Path, new: Callable[[], Hash]) -> str:
    """Return the hexadecimal digest of a file by the hash that ``new`` makes: ``hashlib.sha256``, ``xxhash.xxh3_128``."""
    state = new()
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            state.update(block)
    return state.hexdigest()


def cache_key(value: Any) -> str:
    """Return the 32 hexadecimal digits under which a result is cached that ``value``, of JSON, decides."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _sync_file_range() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begin to write these pages back, and do not wait
_sync = _sync_file_range()


def begin_writing_back(descriptor: int, offset: int, count: int) -> None:
    """Start writing ``count`` bytes of an open file to the disk, without waiting.

    Without the system call, the kernel starts later. Errors are reported when the file is synchronised.
    """
    if _sync is not None:
        with contextlib.suppress(OSError):
            _sync(descriptor, offset, count, _WRITE)


class HashingWriter(io.BufferedWriter):
    """Sequential file writer that digests the data and starts its write-back meanwhile.

    Otherwise it would be read once more for its digest, and ``fsync`` at its end would take as long again as writing it.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for writing."""
        super().__init__(io.FileIO(path, "wb"))
        self.size = 0
        self._hash = xxhash.xxh3_128()
        self._flushed = 0

    def write(self, buffer: ReadableBuffer, /) -> int:
        """Write all of ``buffer``; return the number of its bytes."""
        # As bytes: len() of a memoryview counts items, which may be larger.
        data = memoryview(buffer).cast("B")
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            super().write(piece)
            self._hash.update(piece)
            self.size += len(piece)
            if self.size - self._flushed >= PIECE:
                self._send()
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Refuse to seek: digested bytes cannot change."""
        raise io.UnsupportedOperation("cannot seek in a file that is digested while it is written")

    def truncate(self, size: int | None = None, /) -> int:
        """Refuse to truncate, as :meth:`seek`."""
        raise io.UnsupportedOperation("cannot truncate a file that is digested while it is written")

    @property
    def digest(self) -> str:
        """Return xxh3 (128 bits, hexadecimal) of the data written so far."""
        return self._hash.hexdigest()

    def _send(self) -> None:
        # The kernel can only write back data that have left Python's buffer.
        self.flush()
        begin_writing_back(self.fileno(), self._flushed, self.size - self._flushed)
        self._flushed = self.size
