"""Files that several processes need and one of them makes: locks, caches, and the removal of old entries."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.runtime.io.atomic import honour_umask, put_in_place
from megascend.runtime.io.paths import followed, make_directory, remove
from megascend.surroundings import private_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

TIMEOUT_S = 600.0
"""Seconds that :func:`cached` and :func:`locked` wait for another process."""
IN_USE_S = 3600.0
"""Seconds after its last use during which :func:`prune` leaves an entry alone."""


def cached(path: Path, make: Callable[[Path], object], timeout_s: float = TIMEOUT_S) -> Path:
    """Return ``path``; create it if it is missing. It appears only when complete, and other processes wait for it.

    Args:
        path: a file or a directory.
        make: writes a file or directory to the path it receives, which is then renamed to ``path``.

    Raises:
        TimeoutError: another process has been making it for ``timeout_s``.
    """
    # Marks the use, for prune(); another user's entry in a shared folder cannot be marked. Before the entry is looked for:
    # prune() in another process reads the time again before it removes an entry.
    with contextlib.suppress(OSError):
        os.utime(path)
    if path.exists():
        return path
    with locked(path, timeout_s):
        # Again: another process may have made it while this one waited for the lock.
        if not path.exists():
            replace(path, make)
    return path


def prune(folder: Path, limit: int, keep: Path) -> list[Path]:
    """Remove the least recently used entries that :func:`cached` made in a folder until the rest takes ``limit`` bytes.

    Entries used within :data:`IN_USE_S` stay, even if they take more. A process that has mapped files that are removed keeps
    them until it ends.

    Args:
        keep: entry that is never removed.

    Returns:
        The removed entries.
    """
    times = {path: _last_use(path) for path in folder.iterdir() if not path.name.startswith(".")}
    entries = {path: used for path, used in times.items() if used is not None}
    sizes = {path: sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()) for path in entries}
    total, removed = sum(sizes.values()), []
    for path in sorted(entries, key=entries.__getitem__):
        if total <= limit:
            break
        used = _last_use(path)  # read again: another process may have used or removed it meanwhile
        if path == keep or used is None or time.time() - used < IN_USE_S:
            continue
        # Renamed first, so that no process reads a partly removed entry.
        trash = path.with_name(f".{path.name}-removed")
        with contextlib.suppress(OSError):
            os.replace(path, trash)
            shutil.rmtree(trash) if trash.is_dir() else trash.unlink()
            removed.append(path)
            total -= sizes[path]
    return removed


def _last_use(path: Path) -> float | None:
    """Return the time of the last :func:`cached` call for a path; None if the path is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Replace ``path`` by the output of ``make``; for use within :func:`locked`."""
    path = followed(path)
    make_directory(path.parent)
    for left in path.parent.glob(f".{glob.escape(path.name)}-*"):
        # A folder's own time stays while the files in it grow, and the process that writes them may be another host's.
        newest = max(
            (used for part in (left, *left.rglob("*")) if (used := _last_use(part)) is not None), default=math.inf
        )
        if time.time() - newest > IN_USE_S:  # left by a process that was killed
            remove(left)
    # Beside the path: a rename is atomic within one file system only. The leading dot hides it from prune().
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        make(fresh)
        honour_umask(fresh)
        put_in_place(fresh, path)


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Admit one process of this user on this machine at a time for ``path``.

    Raises:
        TimeoutError: another one has held it for ``timeout_s``.
        ConfigError: another user may write to the folder of the locks.
    """
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    # Not beside `path`: lock files remain.
    locks = private_folder(Path(tempfile.gettempdir()) / f"megascend-locks-{os.getuid()}")
    try:
        lock = hold(locks / f"{key}.lock", timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"another process has been making {path} for {timeout_s:.0f} s") from error
    try:
        yield
    finally:
        lock.release()


def hold(path: Path, timeout_s: float = 0.0) -> BaseFileLock:
    """Lock the file ``path`` until the lock is released or this process ends, however it ends; return the lock.

    Raises TimeoutError if another process has held it for ``timeout_s``.
    """
    from filelock import FileLock, Timeout

    # Not bound to a thread: a server may be closed by another thread than the one that started it.
    lock = FileLock(path, timeout=timeout_s, mode=0o600, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise TimeoutError(f"{path} is locked by another process") from error
    return lock
