"""transformers looks through the folder of its models once.

To know which file has which name it reads all 1,700 files there, for ``transformers`` and again for
``transformers.models``: of all that a training process opens at its start, a fifth. It remembers what it has read, but by the
folder's path for the one and by that of a file in it for the other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megascend.bootstrap.after_import import after_import
from megascend.changes import patch

MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"


def read_once_on_import() -> None:
    """Have it so from the import of transformers on."""
    after_import(MODULE, read_once)


def read_once() -> None:
    """Idempotent. Versions of transformers that do not remember anything, or have no such function, are left as they are."""
    utils = import_module(MODULE)
    original: Any = getattr(utils, FUNCTION, None)
    if hasattr(original, "cache_info") and not hasattr(original, "__megascend__"):
        patch(utils, FUNCTION, by_folder(original), "remembers folders, whichever of their files it is given")


def by_folder(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """transformers' function, which says of a file what it says of the file's folder, asked for the folder."""

    @functools.wraps(original)
    def function(module_path: str | os.PathLike[str]) -> dict[Any, Any]:
        path = os.fspath(module_path)
        return original(os.path.dirname(path) if os.path.isfile(path) else path)

    function.__megascend__ = True  # type: ignore[attr-defined]
    return function
