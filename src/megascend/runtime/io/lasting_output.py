"""Standard output and error that end no run: what cannot be written is dropped.

A reader that goes away (a pipe, a terminal, ssh), a log on a full disk and a descriptor that was closed before the start make
every ``print`` raise, and the flush at the interpreter's end turn the exit code into 120. The remedy is below the streams: it
holds for all code that writes to them: this package, rich, tqdm, transformers' warnings.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2}
PERMANENT_ERRORS = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ENOTCONN, errno.ECONNRESET)
"""Errors after which nothing written to a descriptor will be read by anyone; after others (a full disk) it may be later."""


class LastingFile(io.RawIOBase):
    """Writes to a descriptor what can be written, and drops the rest. Leaves the descriptor open when it is closed.

    Attributes:
        name: name of the stream, as in ``sys.stdout.name``.
        loss: why something was dropped the first time, until somebody has taken note of it.
    """

    mode = "wb"

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self.name = descriptor, f"<{name}>"
        self.loss: str | None = None
        self._lossy = False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data``, or drop the rest; return its length in both cases."""
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        while remaining:
            try:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            except BlockingIOError:  # another process that shares it has made it non-blocking
                select.select([], [self._descriptor], [], 1.0)
            except OSError as error:
                self.note_loss(error)
                break
        return size

    def note_loss(self, error: OSError) -> None:
        """Take note of the first error. Where nothing will be read again, the descriptor becomes the null device: libraries and
        child processes write to it as well."""
        if not self._lossy:
            self._lossy, self.loss = True, f"{error.strerror or error}"
        if error.errno in PERMANENT_ERRORS:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._descriptor)
            os.close(null)


class LastingOutput:
    """``sys.stdout`` and ``sys.stderr`` over a :class:`LastingFile` each, unless they are already, or are no files (in a test,
    a notebook)."""

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def install(self) -> None:
        """Put the streams in place. A standard descriptor that is closed becomes the null device: else the next file that is
        opened would have its number, and receive what libraries print."""
        closed = [name for name, number in DESCRIPTORS.items() if _occupy(number)]
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # as Python does for a closed descriptor
                file = LastingFile(DESCRIPTORS[name] if name in closed else os.open(os.devnull, os.O_WRONLY), name)
                file.note_loss(OSError(errno.EBADF, "it was closed before the start"))
                self._replace(name, _text(io.BufferedWriter(file), encoding="utf-8", line_buffering=True))
            elif isinstance(stream, io.TextIOWrapper):
                raw = getattr(stream.buffer, "raw", stream.buffer)
                if isinstance(raw, io.FileIO):
                    # The stream may be broken already; its buffer is then lost.
                    with contextlib.suppress(OSError):
                        stream.flush()
                    file = LastingFile(raw.fileno(), name)
                    buffer: Any = file if raw is stream.buffer else io.BufferedWriter(file)
                    options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
                    self._replace(name, _text(buffer, encoding=stream.encoding, **options))

    def restore(self) -> None:
        """Restore what :meth:`install` replaced."""
        for name, (stream, before) in self._replaced.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before)
        self._replaced = {}

    @staticmethod
    def losses() -> Iterator[tuple[str, str]]:
        """Yield each stream that dropped output and the reason, once."""
        for name in ("stdout", "stderr"):
            buffer = getattr(getattr(sys, name), "buffer", None)
            file = getattr(buffer, "raw", buffer)
            if isinstance(file, LastingFile) and file.loss is not None:
                problem, file.loss = file.loss, None
                yield name, problem

    def _replace(self, name: str, stream: io.TextIOWrapper) -> None:
        self._replaced[name] = stream, getattr(sys, name)
        setattr(sys, name, stream)


def _occupy(number: int) -> bool:
    """Open the null device under a standard descriptor's number if that is closed; True if it was."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)
        return True
    return False


def _text(buffer: Any, **options: Any) -> io.TextIOWrapper:
    """Wrap a buffer as a text stream; characters that its encoding lacks are escaped, so that they cannot end the run."""
    return io.TextIOWrapper(buffer, errors="backslashreplace", **options)
