"""Files that several processes want and one of them makes: pytest's workers share tiny models and references."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from megascend import files
from megascend.errors import DistributedTestError
from megascend.files import replace

__all__ = ["alone", "cached", "replace"]


def cached(path: Path, make: Callable[[Path], object]) -> Path:
    """:func:`megascend.files.cached`, for tests.

    Raises:
        DistributedTestError: another process has been making it for ten minutes.
    """
    if path.exists():
        return path
    with alone(path):
        if not path.exists():
            replace(path, make)
    return path


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """:func:`megascend.files.locked`, for tests.

    Raises:
        DistributedTestError: another process has been in here for ten minutes.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(path))
        except TimeoutError as error:
            raise DistributedTestError(str(error)) from error
        yield
