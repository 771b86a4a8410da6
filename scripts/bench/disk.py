"""What a disk does with plain files: the reference of checkpoints, loading and exports."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = 2**24
THREADS = 8


def on_threads(share: Callable[[int], None]) -> float:
    """Return the seconds of ``share(number)`` on all threads at once."""
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(share, range(THREADS)))
    return time.perf_counter() - start


def write_file(path: Path, size: int) -> None:
    """Write ``size`` random bytes (a repeated block), and have them on the disk."""
    block = os.urandom(min(BLOCK, size))
    with path.open("wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def write_files(folder: Path, size: int) -> float:
    """Return the seconds to have ``size`` random bytes on the disk, by threads, a file each."""
    paths = [folder / f"plain-{number}" for number in range(THREADS)]
    seconds = on_threads(lambda number: write_file(paths[number], max(1, size // THREADS)))
    seconds *= size / sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    return seconds


def read_file(path: Path) -> None:
    """Read a file to its end."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(BLOCK)
        while file.readinto(buffer):
            pass


def read_files(paths: list[Path]) -> float:
    """Return the seconds to read all bytes of files by threads, past the page cache if the file system can."""
    descriptors = {path: opened(path) for path in paths}
    blocks = [(path, offset) for path in paths for offset in range(0, path.stat().st_size, BLOCK)]
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]  # of whole pages, as O_DIRECT wants them

    def share(number: int) -> None:
        for path, offset in blocks[number::THREADS]:
            os.preadv(descriptors[path], [buffers[number]], offset)

    seconds = on_threads(share)
    for descriptor in descriptors.values():
        os.close(descriptor)
    return seconds


def opened(path: Path) -> int:
    """Open a file past the page cache where the file system can; its pages have been dropped in any case."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def drop_pages(path: Path) -> None:
    """Forget what the page cache has of a file, or of all files under a directory."""
    for file in files_of(path):
        with file.open("rb") as opened_file:
            os.posix_fadvise(opened_file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush(path: Path) -> None:
    """Have a directory's files on the disk; pages that are not there yet cannot be dropped."""
    for file in files_of(path):
        with file.open("rb") as opened_file:
            os.fsync(opened_file.fileno())


def size_of(path: Path, pattern: str = "*") -> int:
    """Return the bytes of all files under a directory."""
    return sum(entry.stat().st_size for entry in path.rglob(pattern) if entry.is_file())


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]
