"""Do something as soon as another's module has been imported, whoever imports it, and not earlier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    sys.meta_path.insert(0, _Finder(name, call))
    changed("sys.meta_path", f"waits for {name} to be imported")


class _Finder(MetaPathFinder):
    """Finds one module as the finders behind it do; looking for it without importing it changes nothing."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _Loader(Loader):
    """The module's own loader, and the call after it."""

    def __init__(self, inner: Loader, finder: _Finder) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._finder.imported()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what a loader may have besides: get_code, get_source, is_package ...
