"""Do something as soon as another's module has been imported, whoever imports it, and not earlier."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

from megascend.bootstrap.around_import import around_import
from megascend.changes import changed


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call ``call`` when module ``name`` has been imported; at once, if it has been.

    It is called before the importer gets the module, so that ``from name import function`` finds what ``call`` has put there.
    What it raises fails the import. Several calls for one module come in the order in which they were registered.
    """
    if name in sys.modules:
        call()
        return

    @contextlib.contextmanager
    def block(module: ModuleType) -> Iterator[None]:
        yield
        call()

    around_import(name, block)
    changed("sys.meta_path", f"waits for {name} to be imported")
