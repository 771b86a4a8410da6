"""Do something as soon as another's module has been imported, and not earlier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from megascend.changes import changed


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` when module ``name`` has been imported; at once, if it has been."""
    if name in sys.modules:
        call()
        return
    sys.meta_path.insert(0, _Finder(name, call))
    changed("sys.meta_path", f"waits for {name} to be imported")


class _Finder(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._call)
        return spec


class _Loader(Loader):
    """The module's own loader, and the call after it."""

    def __init__(self, inner: Loader, call: Callable[[], None]) -> None:
        self._inner, self._call = inner, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._call()
