"""Atomic replacement of files and directories: written under a temporary name in the same directory, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megascend.errors import ConfigError
from megascend.runtime.io.paths import followed, is_mount_point, make_directory, remove, unwritable_reason
from megascend.surroundings import process_status

WRITING, MOVING, OLD_ENTRIES = ".megascend-writing", ".megascend-going", ".megascend-gone"
"""Subdirectories of a directory that cannot be renamed: its new content, and its old content during and after the move."""
NOT_RENAMED = (errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EACCES)
"""Errors of renaming a directory whose entries may still be renamed: a mount point, a lower layer of an overlay file system, a
directory in another user's directory."""
UNSYNCED_DIRECTORY = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EACCES)
"""Errors of synchronising a directory where the file system does not support it, or this user may not list it."""
RESERVED = (WRITING, MOVING, OLD_ENTRIES, "lost+found")
"""Names in a directory that are not its content; the last one is in every new ext4 file system."""


def temporary_path(path: Path) -> Path:
    """Return where the replacement of ``path`` is written: ``.NAME.writing``, in the same directory."""
    return path.with_name(f".{path.name}.writing")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path, which replaces ``path`` when the block ends and is removed if it raises.

    If ``path`` is a link, the link stays and its target is replaced.

    Args:
        durable: synchronise the content before the rename, and the directory after it where the file system supports that.
    """
    target = followed(path)
    temporary = temporary_path(target)
    try:
        yield temporary
        if durable:
            synchronise(temporary)
        put_in_place(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        try:
            synchronise(target.parent)
        except OSError as error:
            if error.errno not in UNSYNCED_DIRECTORY:
                raise


def entries(directory: Path) -> list[Path]:
    """Return a directory's entries, without leftovers of an interrupted replacement and ``lost+found``."""
    return [entry for entry in directory.iterdir() if entry.name not in RESERVED]


def vacant(path: Path) -> bool:
    """Check whether ``path`` is missing or an empty directory. Links are followed."""
    return not entries(path) if os.path.isdir(path) else not os.path.exists(path)


def require_vacant(path: Path, option: str = "") -> None:
    """Raise ConfigError unless a new directory can be written at ``path``, which is missing or empty; ``option`` names it."""
    if not vacant(path):
        raise ConfigError(f"{option}{path} exists and is not an empty directory; choose another one")
    if problem := unwritable_reason(path):
        raise ConfigError(f"{option}{path} cannot be written: {problem}")


def staging(target: Path) -> Path:
    """Return the path under which the replacement of the directory ``target`` is written.

    It is beside ``target``, or within it if that cannot be renamed: a mount point (a container's volume), or a directory whose
    parent cannot be written to.
    """
    if target.is_dir() and (is_mount_point(target) or not os.access(target.parent, os.W_OK | os.X_OK)):
        return target / WRITING
    return temporary_path(target)


def heal(target: Path) -> None:
    """Undo an interrupted replacement of ``target``: restore the old content and remove leftovers."""
    old = _old(target)
    # put_in_place() was killed between its two renames if the target is missing, and after them if it exists.
    if os.path.lexists(old):
        if os.path.lexists(target):
            remove(old)
        else:
            os.replace(old, target)
    if target.is_dir():
        _put_entries_back(target, staging(target))


def is_replaceable(path: Path, mark: str) -> bool:
    """Check whether a new directory may replace ``path``: it is missing, empty, or a directory of the same kind.

    Links are followed; an interrupted replacement is undone first.

    Args:
        mark: name of a file that every directory of this kind has.
    """
    heal(followed(path))
    return vacant(path) or (path / mark).is_file()


def stage(target: Path, temporary: Path) -> None:
    """Create ``temporary``, the :func:`staging` directory of ``target``, empty, after :func:`heal`."""
    heal(target)
    remove(temporary)
    make_directory(temporary.parent)
    temporary.mkdir()


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory, which replaces ``path`` when the block ends and is removed if it raises.

    Raises:
        OSError: it cannot be created or moved into place; the old content is unchanged.
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
    """Replace ``target`` by a finished :func:`staging` directory: see :func:`put_in_place`.

    Its files are synchronised before the rename, and get the mode that the umask gives to new files.
    """
    for path in [*temporary.rglob("*"), temporary]:
        honour_umask(path)
        synchronise(path)
    put_in_place(temporary, target)
    with contextlib.suppress(OSError):
        # The rename itself; the content is safe already, so a file system that cannot do this is not an error.
        synchronise(target.parent if temporary.parent != target else target)


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename ``temporary``, a file or a directory, to ``target``, so that at every moment the complete old or new one exists.

    If the file system cannot exchange two directories atomically, ``target`` is missing for an instant, and a process killed then
    leaves it as ``.NAME.old``. If ``target`` cannot be renamed, its entries are exchanged one by one. In both cases :func:`stage`
    restores the old content.

    Raises:
        OSError: it could not be moved into place; the old content is unchanged.
    """
    if not temporary.is_dir():
        os.replace(temporary, target)
        return
    old = _old(target)
    if temporary.parent == target:
        _replace_entries(temporary, target)
    elif not os.path.lexists(target):
        os.replace(temporary, target)
    # rename(2) replaces a directory only if it is empty, so the old one has to move away first.
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
    # The new content is in place. Failing to remove leftovers is not an error: the next replacement tries again.
    remove(temporary)
    remove(old)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _replace_entries(temporary: Path, target: Path) -> None:
    moving, old_entries = target / MOVING, target / OLD_ENTRIES
    try:
        moving.mkdir()
        for entry in entries(target):
            os.replace(entry, moving / entry.name)
        # The turning point: from here on heal() removes new entries, before it only returns old ones.
        os.replace(moving, old_entries)
        for entry in entries(temporary):
            os.replace(entry, target / entry.name)
        temporary.rmdir()
        os.replace(old_entries, target / WRITING)  # from here on the old content is a leftover
    except OSError:
        _put_entries_back(target, temporary)
        raise
    remove(target / WRITING)


def _put_entries_back(target: Path, temporary: Path) -> None:
    """Undo :func:`_replace_entries`, wherever it was interrupted."""
    moving, old_entries = target / MOVING, target / OLD_ENTRIES
    if old_entries.is_dir():
        temporary.mkdir(exist_ok=True)
        for entry in entries(target):
            os.replace(entry, temporary / entry.name)
        os.replace(old_entries, moving)
    if moving.is_dir():
        for entry in moving.iterdir():
            os.replace(entry, target / entry.name)
        moving.rmdir()


def honour_umask(path: Path) -> None:
    """Give a file of mode 0600, as temporary files have, the mode that the umask gives to new files.

    safetensors writes such files. Directories and files of other modes stay as they are.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o600:
        path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Return this process's umask."""
    mask = process_status("Umask", 8)
    if mask is None:
        # It can only be read by setting it. 0o077, so that a file another thread creates meanwhile is private.
        mask = os.umask(0o077)
        os.umask(mask)
    return mask


def synchronise(path: Path) -> None:
    """Write a file's content, or a directory's names, to the disk."""
    # Read-only also for directories, which cannot be opened for writing.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically (Linux: renameat2, man page renameat(2)); False where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    # glibc before 2.28, another libc, or not Linux.
    if renameat2 is None:
        return False
    current, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(current, os.fsencode(first.absolute()), current, os.fsencode(second.absolute()), exchange) == 0
