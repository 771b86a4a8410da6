"""Plug-ins: modules that register losses, engines, architectures and so on when they are imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from megascend.errors import ConfigError, MegascendError
from megascend.tracking.registry import check_tracker_names

ENGINES = ["megatron", "single", "fsdp"]
"""Names of the engines that run files may set; :func:`megascend.register_engine` adds others."""
REMEDY = "install its package into this environment, or put the folder that holds it on PYTHONPATH"


def check_plugins(modules: Sequence[str]) -> None:
    """Raise ConfigError if the package of a plug-in is missing. Imports nothing."""
    for module in modules:
        # find_spec of a submodule would import its parents.
        package = module.partition(".")[0]
        if find_spec(package) is None:
            raise ConfigError(f"plugins: {module!r} cannot be imported, package {package!r} is not installed: {REMEDY}")


def check_names(engine: str, trackers: Iterable[str]) -> None:
    """Refuse names of engines and trackers that are not registered. Imports none of their packages."""
    if engine not in ENGINES:
        matches = get_close_matches(engine, ENGINES, 1)
        advice = f", did you mean {matches[0]}? Known" if matches else "; known"
        raise ConfigError(
            f"unknown engine {engine!r}{advice}: {', '.join(ENGINES)}. Register yours on every rank "
            "(megascend.register_engine; a run file names the module under plugins)"
        )
    check_tracker_names(trackers)


def import_plugins(modules: Sequence[str]) -> None:
    """Import ``modules`` in their order, on every rank before any of the names that they register is used."""
    for module in modules:
        try:
            import_module(module)
        except MegascendError:
            raise
        except Exception as error:
            remedy = f"; {REMEDY}" if isinstance(error, ModuleNotFoundError) else ""
            raise ConfigError(
                f"plugins: importing {module!r} failed: {type(error).__name__}: {error}{remedy}"
            ) from error
