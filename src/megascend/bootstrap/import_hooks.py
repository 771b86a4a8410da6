"""Hooks around and after the import of another's module, whoever imports it, and not earlier."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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


def around_import(name: str, block: Callable[[ModuleType], AbstractContextManager[object]]) -> Callable[[], None]:
    """Execute module ``name``, when it is imported, in a ``with`` block that ``block`` makes of it. It has not been imported.

    The block ends before the importer gets the module. What it raises fails the import. Of several for one module the first
    that was registered is the innermost.

    Returns:
        What takes it back, if the module has not been imported meanwhile.
    """
    finder = _Finder(name, block)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder(MetaPathFinder):
    """Finds one module as the finders behind it do; looking for it without importing it changes nothing."""

    def __init__(self, name: str, block: Callable[[ModuleType], AbstractContextManager[object]]) -> None:
        self._name, self.block = name, block

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HookedLoader(spec.loader, self)
                return spec
        return None

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _HookedLoader(Loader):
    """The module's own loader, within the block."""

    def __init__(self, inner: Loader, finder: _Finder) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner
        if self._finder not in sys.meta_path:  # taken back since the module was looked for
            self._inner.exec_module(module)
            return
        with self._finder.block(module):
            self._inner.exec_module(module)
            self._finder.remove()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what a loader may have besides: get_code, get_source, is_package ...
