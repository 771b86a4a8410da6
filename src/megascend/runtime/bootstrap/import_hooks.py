"""Hooks that run around or after the import of an upstream module, triggered by its first importer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megascend.changes import changed


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call ``call`` after the import of module ``name``; at once, if it is imported already.

    It runs before the importer gets the module, so that ``from name import function`` gets a function that ``call`` replaced.
    An exception in it fails the import. Several calls for one module run in the order of registration.
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
    """Execute module ``name``, at its import, within the context ``block(module)``. It must not be imported yet.

    The context ends before the importer gets the module. An exception in it fails the import. With several contexts for one
    module, the first one registered is the innermost.

    Returns:
        A function that removes the hook, unless the module has been imported.
    """
    finder = _Finder(name, block)
    # First, because the usual finders would find the module before this one.
    sys.meta_path.insert(0, finder)
    return finder.remove


@dataclass(eq=False)
class _Finder(MetaPathFinder):
    """Finder of one module that delegates to the finders after it; a lookup without an import changes nothing."""

    name: str
    block: Callable[[ModuleType], AbstractContextManager[object]]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self not in sys.meta_path:
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


@dataclass(eq=False)
class _HookedLoader(Loader):
    """Wrapper of the module's loader that executes the module within the context."""

    _inner: Loader
    _finder: _Finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # The module must look as if imported normally: importlib.resources and reload() use its loader.
        module.__spec__.loader = module.__loader__ = self._inner
        if self._finder not in sys.meta_path:  # the hook was removed after the lookup
            self._inner.exec_module(module)
            return
        with self._finder.block(module):
            self._inner.exec_module(module)
            self._finder.remove()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # optional methods of a loader: get_code, get_source, is_package ...
