"""Files and directories that appear whole: written beside their place, and renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megascend.io.paths import followed, is_mount_point, make_directory, remove

WITHIN, MOVING, OLD_ENTRIES = ".megascend-writing", ".megascend-going", ".megascend-gone"
"""In a directory that cannot be renamed: what is to be in it, and what was in it while that, then the new, is being moved."""
NOT_RENAMED = (errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EACCES)
"""Errors of renaming a directory whose files may still be renamed: a mount point, one of an overlay's lower layers, one in
another user's directory."""
UNSYNCED_DIRECTORY = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EACCES)
"""Errors of synchronising a directory on a file system that cannot, or in a directory that this user may not list."""
RESERVED = (WITHIN, MOVING, OLD_ENTRIES, "lost+found")
"""Names in a directory that are not its content; the last one is in every new ext4 file system."""


def temporary_path(path: Path) -> Path:
    """Return where the replacement of ``path`` is written: ``.NAME.writing``, in the same directory."""
    return path.with_name(f".{path.name}.writing")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write a file to, which takes the place of ``path`` when the block ends, and is removed if it raises.

    A link stays: the file that it leads to is replaced.

    Args:
        durable: the content is on the disk before it has its name; so is the name when the block has ended, where the file system
            can synchronise directories.
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
    return temporary_path(target)


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
    """Yield a new directory to write to, which takes the place of ``path`` when the block ends, and is removed if it raises.

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
    """Put a finished :func:`staging` directory in the place of ``target``: see :func:`put_in_place`.

    Its files are on the disk before they have their name, and have the mode that the umask gives to new files.

    Raises:
        OSError: it could not be put in place; what was there before is there.
    """
    for path in [*temporary.rglob("*"), temporary]:
        honour_umask(path)
        synchronise(path)
    put_in_place(temporary, target)
    with contextlib.suppress(OSError):
        synchronise(target.parent if temporary.parent != target else target)


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename ``temporary``, a file or a directory, to ``target``: at every moment the old or the new one is there, whole.

    Where the file system cannot exchange two directories at once, ``target`` is missing for an instant, and a process that is
    killed then leaves it as ``.NAME.old``. Where ``target`` cannot be renamed, its entries are exchanged one by one. In both
    cases :func:`stage` puts back what was there.

    Raises:
        OSError: it could not be put in place; what was there before is there.
    """
    if not temporary.is_dir():
        os.replace(temporary, target)
        return
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


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _replace_entries(temporary: Path, target: Path) -> None:
    moving, old_entries = target / MOVING, target / OLD_ENTRIES
    try:
        moving.mkdir()
        for entry in entries(target):
            os.replace(entry, moving / entry.name)
        os.replace(moving, old_entries)
        for entry in entries(temporary):
            os.replace(entry, target / entry.name)
        temporary.rmdir()
        os.replace(old_entries, target / WITHIN)  # from here on it is left over
    except OSError:
        _put_entries_back(target, temporary)
        raise
    remove(target / WITHIN)


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
    """Give a file that its writer has kept to its user (mode 0600, as temporary files are) the mode of any new file.

    safetensors writes such files. Directories and files of other modes stay as they are.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o600:
        path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Return this process's umask; where /proc lacks it, asking for it sets it for an instant."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def synchronise(path: Path) -> None:
    """Write a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically (Linux: renameat2, man page renameat(2)); False where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(first.absolute()), here, os.fsencode(second.absolute()), exchange) == 0
