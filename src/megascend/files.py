"""Files and directories that appear whole: written beside, and renamed; made by one process of several; known by a digest;
on their way to the disk before they are complete."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from megascend.errors import ConfigError

TIMEOUT_S = 600.0
"""How long :func:`cached` and :func:`locked` wait for another process, in seconds."""


CACHE_VARIABLE = "MEGASCEND_CACHE"
CACHE_LIMIT_VARIABLE = "MEGASCEND_CACHE_GIB"
CACHE_GIB = 50
"""Default of that variable."""
IN_USE_S = 3600.0
"""How long :func:`prune` leaves alone what somebody has asked for, in seconds."""


def cache_folder() -> Path:
    """What outlives the process: ``MEGASCEND_CACHE``, else megascend's folder in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megascend"


def cache_limit() -> int:
    """Bytes that each part of the cache may take: ``MEGASCEND_CACHE_GIB`` GiB, or :data:`CACHE_GIB`.

    Raises:
        ConfigError: the variable holds no number above 0.
    """
    text = os.environ.get(CACHE_LIMIT_VARIABLE) or str(CACHE_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise ConfigError(
            f"{CACHE_LIMIT_VARIABLE}={text!r} must be a number of GiB above 0; the default is {CACHE_GIB}"
        )
    return int(gib * 2**30)


def real(path: Path) -> Path:
    """The absolute path without links; of links that lead back to themselves as far as can be told, where pathlib raises."""
    return Path(os.path.realpath(path))


class Hash(Protocol):
    """What hashlib and xxhash make."""

    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def digest(file: Path, new: Callable[[], Hash]) -> str:
    """The hexadecimal digest of a file.

    Args:
        new: makes the hash: ``hashlib.sha256``, ``xxhash.xxh3_128``.

    Raises:
        OSError: the file cannot be read.
    """
    state = new()
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            state.update(block)
    return state.hexdigest()


# --- on their way to the disk ---


def _sync_file_range() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begin to write these pages back, and do not wait
_sync = _sync_file_range()


def begin_writing_back(descriptor: int, offset: int, count: int) -> None:
    """Have the disk begin with ``count`` bytes of an open file, without waiting for it.

    File systems that cannot be told so begin later. Errors show where the file is synchronised.
    """
    if _sync is not None:
        with contextlib.suppress(OSError):
            _sync(descriptor, offset, count, _WRITE)


# --- written beside, and renamed ---


def beside(path: Path) -> Path:
    """Where what is to take the place of ``path`` is written: ``.NAME.writing``, in the same directory."""
    return path.with_name(f".{path.name}.writing")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path to write a file to, which takes the place of ``path`` when the block ends, and is removed if it raises.

    Args:
        durable: its content is on the disk before it has its name.
    """
    temporary = beside(path)
    try:
        yield temporary
        if durable:
            synchronise(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_directory(temporary: Path, target: Path) -> None:
    """Put a finished directory in the place of ``target``: at every moment one of the two is there, whole.

    Its files are on the disk before they have their name. Where the file system cannot exchange two names in one go,
    ``target`` is missing for an instant, and a process that is killed then leaves it as ``.NAME.old``.
    """
    for path in [*temporary.rglob("*"), temporary]:
        synchronise(path)
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
    if not target.exists():
        os.replace(temporary, target)
    elif _exchange(temporary, target):
        shutil.rmtree(temporary)
    else:
        os.replace(target, old)
        os.replace(temporary, target)
        shutil.rmtree(old)
    synchronise(target.parent)


def synchronise(path: Path) -> None:
    """Have what was written to a file, or the names in a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically (Linux: renameat2, man page renameat(2)); False where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one.absolute()), here, os.fsencode(other.absolute()), exchange) == 0


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be written to a directory, which need not be there yet; None if one can. Leaves nothing behind."""
    missing: list[Path] = []
    there = directory
    while not os.path.lexists(there):
        missing.append(there)
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a directory"
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{there if made == [] else directory}: {error.strerror or error}"
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # another process has begun to use it
                path.rmdir()


# --- for several processes ---


def cached(path: Path, make: Callable[[Path], object], timeout_s: float = TIMEOUT_S) -> Path:
    """``path``, made if there is nothing there yet. Nobody sees it half made, and whoever comes second waits for it.

    Args:
        path: a file or a directory.
        make: writes the path that it is given, a new one in ``path``'s directory, which is then renamed.

    Returns:
        ``path``.

    Raises:
        TimeoutError: another process has been making it for ``timeout_s``.
    """
    with contextlib.suppress(OSError):  # for prune; a folder that is shared may be another user's
        os.utime(path)
    if path.exists():
        return path
    with locked(path, timeout_s):
        if not path.exists():
            replace(path, make)
    return path


def prune(folder: Path, limit: int, keep: Path) -> list[Path]:
    """Remove what :func:`cached` has made in a folder, least recently asked for first, until the rest takes ``limit`` bytes.

    What was asked for within :data:`IN_USE_S` stays, even if that is more. A process that has mapped files that are removed keeps
    them until it ends.

    Args:
        keep: stays in any case.

    Returns:
        What was removed.
    """
    found = {path: _used(path) for path in folder.iterdir() if not path.name.startswith(".")}
    entries = {path: used for path, used in found.items() if used is not None}
    sizes = {path: sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()) for path in entries}
    total, removed = sum(sizes.values()), []
    for path in sorted(entries, key=entries.__getitem__):
        if total <= limit:
            break
        used = _used(path)  # now: another process may have asked for it, or removed it
        if path == keep or used is None or time.time() - used < IN_USE_S:
            continue
        gone = path.with_name(f".{path.name}-removed")  # nobody sees it half removed
        with contextlib.suppress(OSError):
            os.replace(path, gone)
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
            removed.append(path)
            total -= sizes[path]
    return removed


def _used(path: Path) -> float | None:
    """When a path was last asked for, as :func:`cached` notes it; None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put what ``make`` writes in the place of ``path``, whatever is there. For use within :func:`locked`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        make(fresh)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(fresh, path)


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """One process of this user on this machine at a time is in here for ``path``.

    Raises:
        TimeoutError: another one has been for ``timeout_s``.
    """
    from filelock import FileLock, Timeout

    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    locks = Path(tempfile.gettempdir()) / f"megascend-locks-{os.getuid()}"  # not beside it: locks stay when all is done
    locks.mkdir(exist_ok=True)
    lock = FileLock(locks / f"{key}.lock", timeout=timeout_s)
    try:
        lock.acquire()
    except Timeout as error:
        raise TimeoutError(f"another process has been making {path} for {timeout_s:.0f} s") from error
    try:
        yield
    finally:
        lock.release()
