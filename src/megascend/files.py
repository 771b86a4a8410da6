"""Files and directories that appear whole: written beside, and renamed; made by one process of several; known by a digest;
on their way to the disk before they are complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from megascend.errors import ConfigError
from megascend.surroundings import home

TIMEOUT_S = 600.0
"""How long :func:`cached` and :func:`locked` wait for another process, in seconds."""


CACHE_VARIABLE = "MEGASCEND_CACHE"
CACHE_LIMIT_VARIABLE = "MEGASCEND_CACHE_GIB"
CACHE_GIB = 50
"""Default of that variable."""
IN_USE_S = 3600.0
"""How long :func:`prune` leaves alone what somebody has asked for, in seconds."""


def cache_folder() -> Path:
    """What outlives the process: ``MEGASCEND_CACHE``, else megascend's folder in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    A home that cannot be written to stands for none (:func:`megascend.surroundings.home`).
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "megascend"


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


# --- links and mount points ---


def followed(path: Path) -> Path:
    """Return the absolute path of what ``path`` leads to if it is a link, which may be missing; else of ``path`` itself.

    What replaces ``path`` is to be renamed to this: renamed to a link, it would take the link's place.

    Raises:
        OSError: links lead back to themselves (ELOOP).
    """
    path = path.absolute()
    if path.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            path.stat()
    elif path.name not in ("", ".."):
        return path
    return real(path)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, unless it is there. Links are followed, to directories that are missing too.

    Raises:
        OSError: it cannot be made, or something else is there.
    """
    real(path).mkdir(parents=True, exist_ok=True)


def is_mount_point(path: Path) -> bool:
    """Check whether a file system, or a part of one (a bind mount), is mounted at ``path``, which cannot be renamed then."""
    if os.path.ismount(path):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return False
    points = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines)
    return str(real(path)) in points


def stays(path: Path) -> bool:
    """Check whether ``path`` is a link or a mount point, which is emptied or followed where other directories are replaced."""
    return path.is_symlink() or is_mount_point(path)


def remove(path: Path) -> None:
    """Remove whatever is at ``path``, a link itself and nothing behind it; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# --- written beside, and renamed ---

WITHIN, GOING, GONE = ".megascend-writing", ".megascend-going", ".megascend-gone"
"""In a directory that cannot be renamed: what is to be in it, and what was in it while that, then the new, is being moved."""
RESERVED = (WITHIN, GOING, GONE, "lost+found")
"""Names in a directory that are not its content; the last one is in every new ext4 file system."""
NOT_RENAMED = (errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EACCES)
"""Errors of renaming a directory whose files may still be renamed: a mount point, one of an overlay's lower layers, one in
another user's directory."""


def beside(path: Path) -> Path:
    """Where what is to take the place of ``path`` is written: ``.NAME.writing``, in the same directory."""
    return path.with_name(f".{path.name}.writing")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path to write a file to, which takes the place of ``path`` when the block ends, and is removed if it raises.

    A link stays: the file that it leads to is replaced.

    Args:
        durable: its content is on the disk before it has its name.
    """
    target = followed(path)
    temporary = beside(target)
    try:
        yield temporary
        if durable:
            synchronise(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def entries(directory: Path) -> list[Path]:
    """Return what a directory holds, without what an interrupted replacement has left there and ``lost+found``."""
    return [entry for entry in directory.iterdir() if entry.name not in RESERVED]


def vacant(path: Path) -> bool:
    """Check whether nothing would be lost at ``path``: it is missing, or a directory that holds nothing. Links are followed."""
    return not entries(path) if os.path.isdir(path) else not os.path.exists(path)


def staging(target: Path) -> Path:
    """Return where a directory that is to take the place of ``target`` is written.

    Beside it; within it where it cannot be renamed, because it is a mount point (a container's volume) or the directory above it
    cannot be written to.

    Args:
        target: as :func:`followed` returns it.
    """
    if target.is_dir() and (is_mount_point(target) or not os.access(target.parent, os.W_OK | os.X_OK)):
        return target / WITHIN
    return beside(target)


def heal(target: Path) -> None:
    """Put back what was at ``target`` before a replacement that was interrupted, and remove what else that has left there.

    Raises:
        OSError: it cannot be put back.
    """
    old = _old(target)
    if os.path.lexists(old):
        if os.path.lexists(target):
            remove(old)
        else:
            os.replace(old, target)
    if target.is_dir():
        _put_entries_back(target, staging(target))


def is_replaceable(path: Path, mark: str) -> bool:
    """Check whether a directory may take the place of ``path``: nothing is there, or a directory of its kind.

    Links are followed; a replacement that was interrupted is undone first.

    Args:
        mark: the file that every directory of its kind has.

    Raises:
        OSError: what is there cannot be listed.
    """
    heal(followed(path))
    return vacant(path) or (path / mark).is_file()


def stage(target: Path, temporary: Path) -> None:
    """Make ``temporary``, the :func:`staging` directory of ``target``, new and empty, after :func:`heal`.

    Raises:
        OSError: it cannot be made.
    """
    heal(target)
    remove(temporary)
    make_directory(temporary.parent)
    temporary.mkdir()


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """A new directory to write to, which takes the place of ``path`` when the block ends, and is removed if it raises.

    Raises:
        OSError: it cannot be made, or not be put in place; what was there before is there.
    """
    target = followed(path)
    temporary = staging(target)
    stage(target, temporary)
    try:
        yield temporary
        replace_directory(temporary, target)
    finally:
        remove(temporary)


def replace_directory(temporary: Path, target: Path) -> None:
    """Put a finished :func:`staging` directory in the place of ``target``: at every moment one of the two is there, whole.

    Its files are on the disk before they have their name, and have the mode that the umask gives to new files. Where the file
    system cannot exchange two names in one go, ``target`` is missing for an instant, and a process that is killed then leaves it
    as ``.NAME.old``. Where ``target`` cannot be renamed, its entries are exchanged one by one. In both cases :func:`stage` puts
    what was there back.

    Raises:
        OSError: it could not be put in place; what was there before is there.
    """
    for path in [*temporary.rglob("*"), temporary]:
        honour_umask(path)
        synchronise(path)
    old = _old(target)
    if temporary.parent == target:
        _replace_entries(temporary, target)
    elif not os.path.lexists(target):
        os.replace(temporary, target)
    elif not _exchange(temporary, target):
        remove(old)
        try:
            os.replace(target, old)
        except OSError as error:
            if error.errno not in NOT_RENAMED:
                raise
            _replace_entries(temporary, target)
        else:
            try:
                os.replace(temporary, target)
            except OSError:
                os.replace(old, target)
                raise
    # It is in place: what cannot be tidied up is no failure, and the next replacement tries again.
    remove(temporary)
    remove(old)
    with contextlib.suppress(OSError):
        synchronise(target.parent if temporary.parent != target else target)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _replace_entries(temporary: Path, target: Path) -> None:
    going, gone = target / GOING, target / GONE
    try:
        going.mkdir()
        for entry in entries(target):
            os.replace(entry, going / entry.name)
        os.replace(going, gone)
        for entry in entries(temporary):
            os.replace(entry, target / entry.name)
        temporary.rmdir()
        os.replace(gone, target / WITHIN)  # from here on it is left over
    except OSError:
        _put_entries_back(target, temporary)
        raise
    remove(target / WITHIN)


def _put_entries_back(target: Path, temporary: Path) -> None:
    """Undo :func:`_replace_entries`, wherever it was interrupted."""
    going, gone = target / GOING, target / GONE
    if gone.is_dir():
        temporary.mkdir(exist_ok=True)
        for entry in entries(target):
            os.replace(entry, temporary / entry.name)
        os.replace(gone, going)
    if going.is_dir():
        for entry in going.iterdir():
            os.replace(entry, target / entry.name)
        going.rmdir()


def honour_umask(path: Path) -> None:
    """Give a file that its writer has kept to its user (mode 0600, as temporary files are) the mode of any new file.

    safetensors writes such files. Directories and files of other modes stay as they are.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o600:
        path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """This process's umask; where /proc does not tell, asking for it sets it for an instant."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


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
    try:
        there = directory = followed(directory)
        while not os.path.lexists(there):
            missing.append(there)
            there = followed(there.parent)
    except OSError as error:  # links that lead back to themselves
        return f"{directory}: {error.strerror or error}"
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
    except UnicodeEncodeError as error:
        return f"its name has characters that the locale's encoding for files ({error.encoding}) lacks; PYTHONUTF8=1 sets UTF-8"
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
    path = followed(path)
    make_directory(path.parent)
    for left in path.parent.glob(f".{glob.escape(path.name)}-*"):
        # A folder's own time stays while the files in it grow, and the process that writes them may be another host's.
        newest = max((used for part in (left, *left.rglob("*")) if (used := _used(part)) is not None), default=math.inf)
        if time.time() - newest > IN_USE_S:  # of a process that was killed
            remove(left)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        make(fresh)
        if fresh.is_file():
            honour_umask(fresh)
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
