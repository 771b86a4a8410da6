"""Defer imports of upstream modules that training does not need until their first use.

A third of the modules that ``import mcore_bridge`` loads are pandas, pyarrow, datasets, scipy and their dependencies, for a file
lock and a function of object detection. Calling such a function, or looking up such a name, later imports the real module. Active
only while a megascend engine imports its packages.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from megascend.changes import changed, patch
from megascend.runtime.bootstrap.import_hooks import around_import


@dataclass(frozen=True)
class DeferredCalls:
    """Functions that module ``user``, or one of its imports, imports from module ``source`` and only calls later."""

    user: str
    source: str
    names: tuple[str, ...]

    @contextlib.contextmanager
    def block(self, module: ModuleType) -> Iterator[None]:
        """Replace ``source`` by a stand-in with these functions within the context, unless it is imported already."""
        with stand_in_for(self.source, self.names) as stand_in:
            yield
        if stand_in is not None:
            changed(self.user, f"imports {self.source} when it calls {' or '.join(self.names)}")


@dataclass(frozen=True)
class DeferredNames:
    """Names that module ``user`` imports from module ``source``, of the same package, only to re-export them."""

    user: str
    source: str

    @contextlib.contextmanager
    def block(self, module: ModuleType) -> Iterator[None]:
        """Replace ``source`` by a stand-in, unless it is imported already; ``user`` looks up its names at first use."""
        with stand_in_for(self.source) as stand_in:
            yield
        if stand_in is None or not stand_in._requested:
            return
        # Remove the placeholders, so that a lookup reaches the module's __getattr__.
        for name in stand_in._requested:
            vars(module).pop(name, None)
        original: Callable[[str], Any] | None = vars(module).get("__getattr__")

        def look_up(name: str) -> Any:
            if name in stand_in._requested:
                return getattr(import_module(self.source), name)
            if original is None:
                raise AttributeError(f"module {self.user!r} has no attribute {name!r}")
            return original(name)

        patch(module, "__getattr__", look_up, f"imports {self.source} when one of its names is looked up")


@dataclass(frozen=True)
class BlockedImport:
    """Module ``source``, an optional import of package ``user``, which is made to fail."""

    user: str
    source: str

    @contextlib.contextmanager
    def block(self, module: ModuleType) -> Iterator[None]:
        """Make the import of ``source`` fail within the context, unless it is imported already."""
        if self.source in sys.modules:
            yield
            return
        # None in sys.modules makes an import raise ModuleNotFoundError.
        sys.modules[self.source] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            if self.source in sys.modules and sys.modules[self.source] is None:
                del sys.modules[self.source]
        changed(self.user, f"does not import {self.source} by itself")


DEFERRED: tuple[DeferredCalls | DeferredNames | BlockedImport, ...] = (
    DeferredCalls("mcore_bridge.utils.torch_utils", "datasets.utils.filelock", ("FileLock",)),
    DeferredCalls("mcore_bridge.utils.torch_utils", "modelscope.hub.utils.utils", ("get_cache_dir",)),
    DeferredCalls("transformers.loss.loss_utils", "scipy.optimize", ("linear_sum_assignment",)),
    # onnxscript and onnx, for an export to ONNX
    DeferredNames("transformer_engine.pytorch.export", "transformer_engine.pytorch.onnx_extensions"),
    # JAX, where it is installed
    BlockedImport("transformer_engine", "transformer_engine.jax"),
)


@contextlib.contextmanager
def deferring(deferred: tuple[DeferredCalls | DeferredNames | BlockedImport, ...] = DEFERRED) -> Iterator[None]:
    """Defer these imports for modules that are imported within the context, on any thread."""
    with contextlib.ExitStack() as hooks:
        for entry in deferred:
            if entry.user not in sys.modules:
                hooks.callback(around_import(entry.user, entry.block))
        yield


class _StandIn(ModuleType):
    """Stand-in module: functions call those of the real module; any other attribute imports the real module.

    Args:
        names: names of the functions; default: any name that is looked up.
    """

    def __init__(self, source: str, names: tuple[str, ...] | None = None) -> None:
        super().__init__(source, "put here by megascend.bootstrap")
        self._names = names
        self._requested: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by the import system
            raise AttributeError(name)
        if self._names is None or name in self._names:
            self._requested.add(name)
            return _deferred_function(self.__name__, name)
        return getattr(_import_real(self.__name__), name)


@contextlib.contextmanager
def stand_in_for(source: str, names: tuple[str, ...] | None = None) -> Iterator[_StandIn | None]:
    """Install a stand-in for module ``source`` within the context; yield None if the module is imported already."""
    if source in sys.modules:
        yield None
        return
    stand_in = sys.modules[source] = _StandIn(source, names)
    try:
        yield stand_in
    finally:
        _remove_stand_in(source)


def _deferred_function(source: str, name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(_import_real(source), name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function


def _import_real(source: str) -> ModuleType:
    _remove_stand_in(source)
    return import_module(source)


def _remove_stand_in(source: str) -> None:
    if isinstance(sys.modules.get(source), _StandIn):
        del sys.modules[source]
