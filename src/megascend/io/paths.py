"""Where files are: the cache, what links lead to, mount points, whether a directory can be written."""

from __future__ import annotations

import contextlib
import math
import os
import re
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

    A home that cannot be written to counts as none (:func:`megascend.surroundings.home`).
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "megascend"


def cache_limit() -> int:
    """Return the bytes that each part of the cache may take: ``MEGASCEND_CACHE_GIB`` GiB, or :data:`CACHE_GIB`.

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
    """Return the absolute path without links, also if links lead back to themselves, where pathlib raises."""
    return Path(os.path.realpath(path))


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


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be written to a directory, which may be missing; None if one can. Leaves nothing behind."""
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
    created: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            created.append(path)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{there if created == [] else directory}: {error.strerror or error}"
    except UnicodeEncodeError as error:
        return f"its name has characters that the locale's encoding for files ({error.encoding}) lacks; PYTHONUTF8=1 sets UTF-8"
    finally:
        for path in reversed(created):
            with contextlib.suppress(OSError):  # another process has begun to use it
                path.rmdir()
