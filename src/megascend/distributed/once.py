"""What several processes want and one of them makes: files and directories that appear whole, under a lock of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

TIMEOUT_S = 600.0


def made_once(path: Path, make: Callable[[Path], object], timeout_s: float = TIMEOUT_S) -> Path:
    """``path``, made if there is nothing there yet. Nobody sees it half made, and whoever comes second waits for it.

    Args:
        path: a file or a directory.
        make: writes the path that it is given, a new one in ``path``'s directory, which is then renamed.

    Returns:
        ``path``.

    Raises:
        TimeoutError: another process has been making it for ``timeout_s``.
    """
    if path.exists():
        return path
    with alone(path, timeout_s):
        if not path.exists():
            replace(path, make)
    return path


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put what ``make`` writes in the place of ``path``, whatever is there. For use within :func:`alone`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        make(fresh)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(fresh, path)


@contextlib.contextmanager
def alone(path: Path, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
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
