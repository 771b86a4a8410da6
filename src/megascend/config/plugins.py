"""Modules of other packages that register losses, engines, architectures and the like when they are imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from megascend.errors import ConfigError, MegascendError
from megascend.tracking.registry import check_tracker_names

ENGINES = ["megatron", "single", "fsdp"]
"""Names of the engines that run files can ask for; :func:`megascend.register_engine` adds others."""
REMEDY = "install its package into this environment, or put the folder that holds it on PYTHONPATH"


def check_plugins(modules: Sequence[str]) -> None:
    """Find out, without importing anything, that the package of a plug-in is not there."""
    for module in modules:
        package = module.partition(".")[0]
        if find_spec(package) is None:
            raise ConfigError(f"plugins: there is no package {package!r}, of {module!r}: {REMEDY}")


def check_names(engine: str, trackers: Iterable[str]) -> None:
    """Refuse names of engines and trackers that nobody has registered. Imports none of their packages."""
    if engine not in ENGINES:
        alike = get_close_matches(engine, ENGINES, 1)
        advice = f", did you mean {alike[0]}?" if alike else ";"
        raise ConfigError(
            f"engine: there is no {engine!r}{advice} there are {', '.join(ENGINES)}. Register yours on every rank "
            "(megascend.register_engine; a run file names the module under plugins)"
        )
    check_tracker_names(trackers)


def import_plugins(modules: Sequence[str]) -> None:
    """Import ``modules`` in their order. Every rank does so before anything that they register is named."""
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
