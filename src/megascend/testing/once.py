"""Files that several processes want and one of them makes: pytest's workers share tiny models and references."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from megascend.errors import DistributedTestError

TIMEOUT_S = 600.0


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """``path``, made if there is nothing there yet. Nobody sees it half made, and whoever comes second waits for it.

    Args:
        path: a file or a directory.
        make: writes the path that it is given, a new one in ``path``'s directory, which is then renamed.

    Returns:
        ``path``.

    Raises:
        DistributedTestError: another process has been making it for ten minutes.
    """
    if path.exists():
        return path
    with alone(path):
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
def alone(path: Path) -> Iterator[None]:
    """One process of this user on this machine at a time is in here for ``path``.

    Raises:
        DistributedTestError: another one has been for ten minutes.
    """
    from filelock import FileLock, Timeout

    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    locks = Path(tempfile.gettempdir()) / f"megascend-locks-{os.getuid()}"  # not beside it: locks stay when all is done
    locks.mkdir(exist_ok=True)
    try:
        with FileLock(locks / f"{key}.lock", timeout=TIMEOUT_S):
            yield
    except Timeout as error:
        raise DistributedTestError(f"another process has been making {path} for {TIMEOUT_S:.0f} s") from error
