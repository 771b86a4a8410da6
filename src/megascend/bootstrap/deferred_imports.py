"""Imports of upstream modules that training does not need: they take place when what they bring is used, or not at all.

A third of the modules that ``import mcore_bridge`` brings are pandas, pyarrow, datasets, scipy and what these import, for a file
lock and a function of object detection. Nothing is missing afterwards: who calls such a function, or asks for such a name, gets
the real one. In effect while an engine of megascend's imports its packages, and no longer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from megascend.bootstrap.import_hooks import around_import
from megascend.changes import changed, patch


@dataclass(frozen=True)
class Called:
    """Functions that module ``user``, or what it imports, takes from module ``source`` and only calls."""

    user: str
    source: str
    names: tuple[str, ...]

    @contextlib.contextmanager
    def block(self, module: ModuleType) -> Iterator[None]:
        """``source``, where it has not been imported, is a stand-in with these functions until the block ends."""
        with standing_in(self.source, self.names) as stand_in:
            yield
        if stand_in is not None:
            changed(self.user, f"imports {self.source} when it calls {' or '.join(self.names)}")


@dataclass(frozen=True)
class PassedOn:
    """Names that module ``user`` takes from module ``source``, of the same package, only to pass them on."""

    user: str
    source: str

    @contextlib.contextmanager
    def block(self, module: ModuleType) -> Iterator[None]:
        """``source``, where it has not been imported, is a stand-in whose names ``user`` looks up later."""
        with standing_in(self.source) as stand_in:
            yield
        if stand_in is None or not stand_in._given:
            return
        for name in stand_in._given:
            vars(module).pop(name, None)
        own: Callable[[str], Any] | None = vars(module).get("__getattr__")

        def look_up(name: str) -> Any:
            if name in stand_in._given:
                return getattr(import_module(self.source), name)
            if own is None:
                raise AttributeError(f"module {self.user!r} has no attribute {name!r}")
            return own(name)

        patch(module, "__getattr__", look_up, f"imports {self.source} when one of its names is asked for")


@dataclass(frozen=True)
class LeftOut:
    """Module ``source``, which package ``user`` tries to import where it can be imported, and goes without where not."""

    user: str
    source: str

    @contextlib.contextmanager
    def block(self, module: ModuleType) -> Iterator[None]:
        """``source``, where it has not been imported, cannot be imported until the block ends."""
        if self.source in sys.modules:
            yield
            return
        sys.modules[self.source] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            if self.source in sys.modules and sys.modules[self.source] is None:
                del sys.modules[self.source]
        changed(self.user, f"does not import {self.source} by itself")


DEFERRED: tuple[Called | PassedOn | LeftOut, ...] = (
    Called("mcore_bridge.utils.torch_utils", "datasets.utils.filelock", ("FileLock",)),
    Called("mcore_bridge.utils.torch_utils", "modelscope.hub.utils.utils", ("get_cache_dir",)),
    Called("transformers.loss.loss_utils", "scipy.optimize", ("linear_sum_assignment",)),
    # onnxscript and onnx, for an export to ONNX
    PassedOn("transformer_engine.pytorch.export", "transformer_engine.pytorch.onnx_extensions"),
    # JAX, where it is installed
    LeftOut("transformer_engine", "transformer_engine.jax"),
)


@contextlib.contextmanager
def deferring(deferred: tuple[Called | PassedOn | LeftOut, ...] = DEFERRED) -> Iterator[None]:
    """Modules that are imported in the block, on any thread, import less."""
    undo: list[Callable[[], None]] = []
    try:
        for each in deferred:
            if each.user not in sys.modules:
                undo.append(around_import(each.user, each.block))
        yield
    finally:
        for call in undo:
            call()


class _StandIn(ModuleType):
    """Has functions that call the real module's; for everything else it is the real module, imported then.

    Args:
        names: of the functions; default: whatever is asked for, which is not to be used before the real module is there.
    """

    def __init__(self, source: str, names: tuple[str, ...] | None = None) -> None:
        super().__init__(source, "put here by megascend.bootstrap")
        self._names = names
        self._given: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for
            raise AttributeError(name)
        if self._names is None or name in self._names:
            self._given.add(name)
            return _calling(self.__name__, name)
        return getattr(_real(self.__name__), name)


@contextlib.contextmanager
def standing_in(source: str, names: tuple[str, ...] | None = None) -> Iterator[_StandIn | None]:
    """A stand-in for module ``source`` until the block ends; None where it has been imported."""
    if source in sys.modules:
        yield None
        return
    stand_in = sys.modules[source] = _StandIn(source, names)
    try:
        yield stand_in
    finally:
        _remove_stand_in(source)


def _calling(source: str, name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real(source), name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function


def _real(source: str) -> ModuleType:
    _remove_stand_in(source)
    return import_module(source)


def _remove_stand_in(source: str) -> None:
    if isinstance(sys.modules.get(source), _StandIn):
        del sys.modules[source]
