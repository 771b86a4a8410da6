"""The hook of ``megascend run``: call ``megascend.bootstrap()`` just before a process first imports Megatron or a companion.

It is loaded into every Python process of the command, even where megascend is not installed, so it only imports the standard
library until then.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

PLATFORM_VARIABLE = "MEGASCEND_RUN_PLATFORM"
ENGINE = "megatron-core"  # mcore-bridge is not needed
FIRST = ("megatron", "mindspeed", "transformer_engine", "mcore_bridge")
EXIT_ERROR = 2


def arm(environment: Mapping[str, str]) -> None:
    """Bootstrap this process when one of the packages is first imported."""
    platform = environment.get(PLATFORM_VARIABLE, "auto")

    def prepare() -> None:
        try:
            import_module("megascend.runtime.bootstrap.runtime").bootstrap(platform, engine=ENGINE)
        except Exception as error:  # noqa: BLE001  the process must not continue without the bootstrap
            end(error)

    before_import(prepare)


def before_import(prepare: Callable[[], object]) -> None:
    """Call ``prepare`` just before one of the packages is first imported; an exception from it fails the import."""
    sys.meta_path.insert(0, _BeforeImport(prepare))


def disarm() -> None:
    """Remove the hook, because the process prepares itself."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _BeforeImport)]


class _BeforeImport(MetaPathFinder):
    def __init__(self, prepare: Callable[[], object]) -> None:
        self._prepare = prepare

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FIRST or not _is_import(sys._getframe(1)):
            return None
        disarm()  # first: what prepares imports them too
        try:
            self._prepare()
        except BaseException:
            sys.meta_path.insert(0, self)  # the next import of one must not succeed unprepared
            raise
        return _imported_spec(fullname)


def _is_import(frame: object) -> bool:
    """Check whether the finder's caller is an import; it may also be a probe for an installed package (``find_spec``)."""
    for _ in range(4):
        if frame is None:
            return False
        code = frame.f_code  # type: ignore[attr-defined]
        if code.co_name == "_find_and_load_unlocked" and "importlib._bootstrap" in code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[attr-defined]
    return False


def end(error: Exception) -> NoReturn:
    """Report the error and end the process: programs would treat an exception as a missing Megatron, and continue."""
    rank = os.environ.get("RANK")
    if not type(error).__module__.startswith("megascend.") or os.environ.get("MEGASCEND_DEBUG") == "1":
        traceback.print_exc()
    rank_note = f" (rank {rank})" if rank is not None else ""
    hint = ""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "megascend":
        hint = f"; megascend is not installed for {sys.executable}"
    print(f"megascend run{rank_note}: {type(error).__name__}: {error}{hint}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # SystemExit could be caught by the program, too.
    os._exit(EXIT_ERROR)


def _imported_spec(name: str) -> ModuleSpec | None:
    """Return a spec that yields the module if the bootstrap has imported it, else None.

    Python uses the ``__spec__`` of a module that appeared in ``sys.modules`` during the lookup, and would execute the module's
    file again.
    """
    module = sys.modules.get(name)
    original = getattr(module, "__spec__", None)
    if module is None or original is None:
        return None
    spec = ModuleSpec(name, _Present(module, original), origin=original.origin, is_package=hasattr(module, "__path__"))
    spec.submodule_search_locations = original.submodule_search_locations
    module.__spec__ = spec
    return spec


class _Present(Loader):
    """Loader that returns an imported module and restores its original spec."""

    def __init__(self, module: ModuleType, original: ModuleSpec) -> None:
        self._module, self._original = module, original

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._original
