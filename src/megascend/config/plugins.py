"""Modules of other packages that register losses, engines, architectures and the like when they are imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from megascend.errors import ConfigError, MegascendError

REMEDY = "install its package into this environment, or put the folder that holds it on PYTHONPATH"


def check_plugins(modules: Sequence[str]) -> None:
    """Find out, without importing anything, that the package of a plug-in is not there.

    Raises:
        ConfigError: it is not; the message names the module.
    """
    for module in modules:
        package = module.partition(".")[0]
        if find_spec(package) is None:
            raise ConfigError(f"plugins: there is no package {package!r}, of {module!r}: {REMEDY}")


def import_plugins(modules: Sequence[str]) -> None:
    """Import ``modules`` in their order. Every rank does so before anything that they register is named.

    Raises:
        ConfigError: one cannot be imported; the message names it, and the error it ended with.
        MegascendError: what it registers is refused.
    """
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
