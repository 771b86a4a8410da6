"""An append-only file of entries: what was appended is on the disk, and a file that was cut off or damaged is told apart.

    MAGIC MARK CRC                        MARK: 8 random bytes of this file; with its own checksum
    MARK LENGTH CRC-OF-PAYLOAD CRC        a frame's head, and then its payload: the entries of one append
    ...

A frame is on the disk before the next one is begun. So a frame that is not whole is the last one, which nobody was promised, or
the file is damaged: a frame's head after it tells. Clients do not know MARK, so nothing of theirs looks like one.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascend.errors import CheckpointError
from megascend.io.atomic import beside, replacing, synchronise

MAGIC = b"megascend journal 1\n"
_START = struct.Struct("<20s8sI")
_HEAD = struct.Struct("<8sQII")
_SIZES = struct.Struct("<IQ")


@dataclass(frozen=True)
class Entry:
    """One entry.

    Attributes:
        values: what JSON can hold.
        body: bytes as they came from a client.
    """

    kind: str
    values: Mapping[str, Any]
    body: bytes = b""


@dataclass(frozen=True)
class Place:
    """Where an entry's body lies in the file, and how many bytes the whole entry takes."""

    offset: int
    length: int
    size: int


def packed(entries: Sequence[Entry]) -> tuple[bytes, list[Place]]:
    """A frame's payload, and places within it."""
    parts, places, at = [], [], 0
    for entry in entries:
        head = json.dumps([entry.kind, entry.values], separators=(",", ":")).encode()
        parts += [_SIZES.pack(len(head), len(entry.body)), head, entry.body]
        size = _SIZES.size + len(head) + len(entry.body)
        places.append(Place(at + size - len(entry.body), len(entry.body), size))
        at += size
    return b"".join(parts), places


def unpacked(payload: bytes) -> list[tuple[Entry, Place]]:
    """The inverse of :func:`packed`; bodies are left out."""
    found, at = [], 0
    while at < len(payload):
        head, body = _SIZES.unpack_from(payload, at)
        start = at + _SIZES.size
        kind, values = json.loads(payload[start : start + head])
        size = _SIZES.size + head + body
        found.append((Entry(kind, values), Place(start + head, body, size)))
        at += size
    return found


class Journal:
    """The file, open for appending by this process alone.

    Args:
        path: made if there is none.

    Attributes:
        size: of the file up to its last whole frame, in bytes.
        cut: bytes of a frame at its end that was not whole.

    Raises:
        CheckpointError: it is no journal.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.cut = path, 0
        if not path.exists():
            self._begin(path, ())
        self._open()

    def _open(self) -> None:
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115  open as long as this is
        start = self._file.read(_START.size)
        magic, self._mark, crc = _START.unpack(start) if len(start) == _START.size else (b"", b"", 0)
        if magic != MAGIC or crc != zlib.crc32(start[:-4]):
            self._file.close()
            raise CheckpointError(
                f"{self.path} is no journal of this version: its first {_START.size} bytes are others"
            )
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self) -> Iterator[tuple[Entry, Place]]:
        """All entries, without their bodies. What is left of a frame at the end is cut off the file.

        Raises:
            CheckpointError: a frame within the file is damaged; the message has its offset.
        """
        at, end = _START.size, self.size
        while at < end:
            payload = self._frame(at, end)
            if payload is None:
                self._check_last(at, end)
                self.cut = end - at
                self._cut_off(at)
                return
            for entry, place in unpacked(payload):
                yield entry, Place(at + _HEAD.size + place.offset, place.length, place.size)
            at += _HEAD.size + len(payload)

    def _frame(self, at: int, end: int) -> bytes | None:
        """The payload of the frame at an offset; None if it is not whole."""
        length, crc = self._head(self._bytes(at, min(_HEAD.size, end - at))) or (end, 0)
        if at + _HEAD.size + length > end:
            return None
        payload = self._bytes(at + _HEAD.size, length)
        return payload if zlib.crc32(payload) == crc else None

    def _head(self, head: bytes) -> tuple[int, int] | None:
        """(length, checksum) of the payload behind a frame's head; None if it is no head."""
        if len(head) < _HEAD.size:
            return None
        mark, length, crc, own = _HEAD.unpack(head)
        return (length, crc) if mark == self._mark and own == zlib.crc32(head[:-4]) else None

    def _check_last(self, at: int, end: int) -> None:
        """Raise if another frame begins after the one at ``at``, which is not whole."""
        rest = self._bytes(at + 1, end - at - 1)
        found = rest.find(self._mark)
        while found >= 0:
            if self._head(rest[found : found + _HEAD.size]) is not None:
                raise CheckpointError(
                    f"{self.path}: damaged at offset {at}: entries follow from offset {at + 1 + found} on. The server does not "
                    "start, as it would lose steps; restore the file from a copy, or move it away to begin without it"
                )
            found = rest.find(self._mark, found + 1)

    def _bytes(self, at: int, length: int) -> bytes:
        found = os.pread(self._file.fileno(), length, at)
        while len(found) < length:
            more = os.pread(self._file.fileno(), length - len(found), at + len(found))
            if not more:
                raise CheckpointError(f"{self.path}: it ends at offset {at + len(found)}, {at + length} was expected")
            found += more
        return found

    def body(self, place: Place) -> bytes:
        """An entry's body."""
        return self._bytes(place.offset, place.length)

    def reader(self) -> int:
        """A descriptor of the file as it is now, to read bodies that :meth:`rewrite` may drop; the caller closes it."""
        return os.dup(self._file.fileno())

    def append(self, entries: Sequence[Entry]) -> list[Place]:
        """Write entries as one frame and wait until the disk has them. Where they lie.

        Raises:
            OSError: they are not written, and the file is as before.
        """
        payload, places = packed(entries)
        try:
            _write(self._file.fileno(), self.size, _framed(self._mark, payload))
            os.fsync(self._file.fileno())
        except OSError:
            self._cut_off(self.size)
            raise
        found = [Place(self.size + _HEAD.size + each.offset, each.length, each.size) for each in places]
        self.size += _HEAD.size + len(payload)
        return found

    def rewrite(self, entries: Iterable[Sequence[Entry]]) -> list[Place]:
        """Have these entries alone, each sequence as a frame. At every moment the file as it was or the new one is there.

        Raises:
            OSError: it could not be written, and the file is as before.
        """
        places = self._begin(self.path, entries)
        self._file.close()
        self._open()
        return places

    def _begin(self, path: Path, entries: Iterable[Sequence[Entry]]) -> list[Place]:
        mark, found = secrets.token_bytes(8), []
        start = MAGIC + mark
        with replacing(path, durable=True) as temporary:
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write(descriptor, 0, start + struct.pack("<I", zlib.crc32(start)))
                at = _START.size
                for group in entries:
                    payload, places = packed(group)
                    _write(descriptor, at, _framed(mark, payload))
                    found += [Place(at + _HEAD.size + each.offset, each.length, each.size) for each in places]
                    at += _HEAD.size + len(payload)
            finally:
                os.close(descriptor)
        synchronise(path.parent)
        return found

    def _cut_off(self, size: int) -> None:
        os.ftruncate(self._file.fileno(), size)
        os.fsync(self._file.fileno())
        self.size = size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def unfinished(path: Path) -> Path:
    """What :meth:`Journal.rewrite` leaves behind if the process is killed within it; the next one replaces it."""
    return beside(path)


def _framed(mark: bytes, payload: bytes) -> bytes:
    head = _HEAD.pack(mark, len(payload), zlib.crc32(payload), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def _write(descriptor: int, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
