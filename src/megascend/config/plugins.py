"""Code that run files name: plug-ins, which register losses, engines and so on when they are imported, and single functions."""

from __future__ import annotations

import inspect
import symtable
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megascend.config.registry import (
    ENGINES,
    LOSSES,
    PROVIDERS,
    TRACKERS,
    check_loss_of_responses,
    check_registered,
    losses_of_data,
)
from megascend.errors import ConfigError, MegascendError
from weightwire.transports import transport_names

REMEDY = "install its package into this environment, or put the folder that holds it on PYTHONPATH"


def import_from(folder: Path) -> None:
    """Add the folder of a run file, and the working directory, to the end of ``sys.path``: a script's has neither."""
    sys.path += [entry for entry in dict.fromkeys((str(folder.resolve()), str(Path.cwd()))) if entry not in sys.path]


def check_plugins(modules: Sequence[str]) -> None:
    """Raise ConfigError if a plug-in's file, or its package, is missing. Imports nothing."""
    for module in modules:
        if not module.endswith(".py"):
            check_module("plugins", module)
        elif not Path(module).is_file():
            raise ConfigError(f"plugins: file {Path(module).absolute()} does not exist")


def check_module(setting: str, module: str) -> None:
    """Raise ConfigError if the package of a module is missing. Imports nothing."""
    # find_spec of a submodule would import its parents.
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise ConfigError(f"{setting}: {module!r} cannot be imported, package {package!r} is not installed: {REMEDY}")


def check_names(settings: BaseModel) -> None:
    """Refuse names of engines, providers, trackers, losses and transports that are not registered. Imports none of them."""
    engine, provider = getattr(settings, "engine", None), getattr(settings, "provider", None)
    objective, sync = getattr(settings, "objective", None), getattr(settings, "sync", None)
    if engine is not None:
        ENGINES.require(engine)
    if provider is not None and ":" in provider:
        check_module("provider", provider.partition(":")[0])
    elif provider is not None:
        PROVIDERS.require(provider)
    if objective is not None:
        check_loss_of_responses(objective.loss, reference=getattr(settings, "reference", None) is not None)
    if sync is not None:
        transports, function = ["auto", *transport_names()], "weightwire.transports.register_transport"
        check_registered("transport", sync.transport, transports, function, "sync.transport")
    for tracker in getattr(settings, "tracker_options", ()):
        TRACKERS.require(tracker, "trackers")


def check_loss(name: str, *, plugins: bool) -> None:
    """Refuse a loss of a run file that does not exist. Imports nothing.

    Args:
        plugins: the run has plug-ins, which may register further names.
    """
    if ":" in name:
        check_name(name, "loss")
    elif not plugins:
        check_registered("loss", name, losses_of_data(), LOSSES.function)


def import_plugins(modules: Sequence[str]) -> None:
    """Import ``modules`` in their order, on every rank before any of the names that they register is used."""
    for module in modules:
        try:
            if not module.endswith(".py"):
                import_module(module)
                continue
            path = Path(module).resolve()
            # A file that is imported already, under either name, is not run again: it would register other objects.
            imported = [sys.modules.get(name) for name in (path.stem, f"megascend_plugins_{path.stem}")]
            if all(getattr(other, "__file__", None) != str(path) for other in imported):
                _import_file(path, "plugins")
        except MegascendError:
            raise
        except Exception as error:
            remedy = f"; {REMEDY}" if isinstance(error, ModuleNotFoundError) else ""
            raise ConfigError(
                f"plugins: importing {module!r} failed: {type(error).__name__}: {error}{remedy}"
            ) from error


# --- functions ---


def check_name(name: str, setting: str) -> tuple[str, str]:
    """Split ``name`` into module (or file) and function, without importing anything."""
    module, separator, attribute = name.rpartition(":")
    if not separator or not module or not attribute:
        raise ConfigError(
            f"{setting}: {name!r} must name a function or class as package.module:name or path/to/file.py:name"
        )
    # Without an import, which may load torch: this runs before anything is started.
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"{setting}: file {Path(module).absolute()} does not exist")
    return module, attribute


def check_class(name: str, setting: str) -> None:
    """Raise ConfigError if a file does not define the class that ``name`` gives, or a package is missing. Imports nothing."""
    module, attribute = check_name(name, setting)
    if not module.endswith(".py"):
        check_module(setting, module)
        return
    try:
        symbols = symtable.symtable(Path(module).read_text(encoding="utf-8-sig"), module, "exec").get_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{setting}: {module} cannot be read: {type(error).__name__}: {error}") from error
    if not any(symbol.get_name() == attribute and (symbol.is_assigned() or symbol.is_imported()) for symbol in symbols):
        raise ConfigError(f"{setting}: {module} defines no class {attribute!r}")


def load_object(name: str, setting: str, usable: Callable[[Any], bool] = callable) -> Any:
    """Import ``package.module:name`` or ``path/to/file.py:name``."""
    source, attribute = check_name(name, setting)
    module = _import_file(Path(source), setting) if source.endswith(".py") else _import_package(source, setting)
    value = getattr(module, attribute, None)
    if not usable(value):
        names = [
            key
            for key, member in vars(module).items()
            if (inspect.isfunction(member) or inspect.isclass(member)) and member.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{setting}: {source} has no function or class {attribute!r}; it has {', '.join(names) or 'none'}"
        )
    return value


def _import_package(name: str, setting: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:
        raise ConfigError(f"{setting}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path, setting: str) -> Any:
    name = f"megascend_{setting.rpartition('.')[2]}_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Half a module must not be found by a second import.
        del sys.modules[name]
        raise ConfigError(f"{setting}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
