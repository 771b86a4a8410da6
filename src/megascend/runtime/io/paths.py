"""Resolve paths: the cache, targets of links, mount points, free bytes, and whether a directory can be written."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from pathlib import Path

from megascend.errors import ConfigError
from megascend.surroundings import home

CACHE_VARIABLE = "MEGASCEND_CACHE"
CACHE_LIMIT_VARIABLE = "MEGASCEND_CACHE_GIB"
CACHE_GIB = 50
"""Default of that variable."""


def cache_folder() -> Path:
    """Return the folder of caches: ``MEGASCEND_CACHE``, else megascend's folder in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    A home directory that cannot be written to is not used (:func:`megascend.surroundings.home`).
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "megascend"


def cache_limit() -> int:
    """Return the bytes that each part of the cache may take: ``MEGASCEND_CACHE_GIB`` GiB, or :data:`CACHE_GIB`."""
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
    """Return the absolute path without links; cyclic links, for which pathlib raises, are left in it."""
    return Path(os.path.realpath(path))


def followed(path: Path) -> Path:
    """Return the absolute path of the target if ``path`` is a link (the target may be missing), else of ``path`` itself.

    A replacement of ``path`` is renamed to this path: renaming it to ``path`` would replace the link.
    """
    path = path.absolute()
    if path.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            # Raises ELOOP for cyclic links, which realpath() would return unresolved.
            path.stat()
    elif path.name not in ("", ".."):
        return path
    return real(path)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, unless it exists. Links to missing directories are followed, too."""
    # mkdir() of a dangling link fails with EEXIST.
    real(path).mkdir(parents=True, exist_ok=True)


def is_mount_point(path: Path) -> bool:
    """Check whether ``path`` is a mount point, bind mounts included, which cannot be renamed."""
    import psutil

    # os.path.ismount() compares devices, so it misses a bind mount from the same file system.
    with contextlib.suppress(OSError):  # there is no /proc
        return os.path.ismount(path) or str(real(path)) in {
            mount.mountpoint for mount in psutil.disk_partitions(all=True)
        }
    return False


def is_kept(path: Path) -> bool:
    """Check whether ``path`` is a link or a mount point: such a directory is kept, and its content replaced."""
    return path.is_symlink() or is_mount_point(path)


def remove(path: Path) -> None:
    """Remove a file, link (not its target) or directory, as far as possible; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def unwritable_reason(directory: Path) -> str | None:
    """Return the reason why no file can be written to a directory, which may be missing, or None. Removes what it creates."""
    missing: list[Path] = []
    try:
        ancestor = directory = followed(directory)
        while not os.path.lexists(ancestor):
            missing.append(ancestor)
            ancestor = followed(ancestor.parent)
    except OSError as error:  # cyclic links
        return f"{directory}: {error.strerror or error}"
    if not ancestor.is_dir():
        return f"{ancestor} is not a directory"
    created: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            created.append(path)
        # Tried, not derived from permission bits: those say nothing of read-only mounts, quotas, ACLs and NFS root squashing.
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{ancestor if created == [] else directory}: {error.strerror or error}"
    except UnicodeEncodeError as error:
        return f"its name has characters that the locale's encoding for files ({error.encoding}) lacks; PYTHONUTF8=1 sets UTF-8"
    finally:
        for path in reversed(created):
            with contextlib.suppress(OSError):  # another process has begun to use it
                path.rmdir()


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that holds, or will hold, a path."""
    path = path.resolve()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free


def format_bytes(count: int) -> str:
    """Write bytes in a unit that leaves few digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
