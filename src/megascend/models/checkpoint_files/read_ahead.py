"""Read weight files into the page cache while the process is still importing, checking and building.

Checkpoints are read through memory maps. A map brings in a few pages at a time, each after a fault: of a file that is not in the
page cache, 95 MiB/s where plain reads by several threads reached 760 to 1000 on the same disk. Here threads read the files from
end to end into a buffer that is thrown away, so that the map finds its pages in the cache.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightwire.background import BackgroundThread

CHUNK = 8 * 2**20
THREADS = 4
SHARE_OF_MEMORY = 0.5
"""Share of the available memory: larger files would evict each other from the page cache."""

Chunk = tuple[Path, int, int]
"""(file, offset, length in bytes)."""


@contextlib.contextmanager
def read_ahead(files: Sequence[Path], index: int = 0, count: int = 1) -> Iterator[None]:
    """Read ``files`` into the page cache within the context; errors are left to the real reader.

    ``index``, ``count``: this process among those of the host that do the same; each reads its share.
    """
    sizes = {file: _size(file) for file in files}
    if sum(sizes.values()) > SHARE_OF_MEMORY * available_memory():
        yield
        return
    # Every count-th chunk: all processes advance together, in the order of the files.
    waiting = deque(chunks(sizes)[index::count])
    stopped = threading.Event()
    threads = [
        # Daemons, so that a slow disk does not delay the end of a process that failed.
        BackgroundThread(_read, waiting, stopped, name=f"megascend-read-ahead-{number}")
        for number in range(min(THREADS, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()


def chunks(sizes: dict[Path, int]) -> list[Chunk]:
    """Cut all files, in order, into chunks."""
    return [(file, start, min(CHUNK, size - start)) for file, size in sizes.items() for start in range(0, size, CHUNK)]


def available_memory() -> int:
    """Return the bytes that Linux can give to programs without swapping; 0 if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(waiting: deque[Chunk], stopped: threading.Event) -> None:
    # One buffer for each thread, overwritten by every chunk: only the side effect on the page cache matters.
    buffer = memoryview(bytearray(CHUNK))
    while not stopped.is_set():
        try:
            file, start, length = waiting.popleft()
        except IndexError:
            return
        # Reading ahead is an optimisation only: the loader reports the error when it reads the file itself.
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                if not _is_cached(descriptor, start, length):
                    os.preadv(descriptor, [buffer[:length]], start)
            finally:
                os.close(descriptor)


def _is_cached(descriptor: int, start: int, length: int) -> bool:
    """Check whether both ends of a chunk are in the page cache, and so most likely all of it."""
    for offset in (start, start + length - 1):
        try:
            # RWF_NOWAIT fails with EAGAIN instead of reading from the disk (preadv2(2), Linux 4.14).
            if not os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT):
                return False
        except OSError:  # it is not, or the file system cannot tell
            return False
    return True
