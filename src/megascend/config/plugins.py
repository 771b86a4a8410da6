"""Plug-ins: modules that register losses, engines, architectures and so on when they are imported."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

from pydantic import BaseModel

from megascend.errors import ConfigError, MegascendError
from megascend.tracking.registry import check_tracker_names
from weightwire.transports import transport_names

ENGINES = ["megatron", "single", "fsdp"]
"""Names of the engines that run files may set; :func:`megascend.register_engine` adds others."""
PROVIDERS = ["mindspeed", "megatron_adaptor", "transformer_engine", "reference"]
"""Names of the providers that run files may set; :func:`megascend.register_provider` adds others."""
POLICY_LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro", "stable_reinforce"]
"""Losses that learn from sampled responses; :func:`megascend.register_loss` adds others."""
REMEDY = "install its package into this environment, or put the folder that holds it on PYTHONPATH"


def check_plugins(modules: Sequence[str]) -> None:
    """Raise ConfigError if the package of a plug-in is missing. Imports nothing."""
    for module in modules:
        check_module("plugins", module)


def check_module(setting: str, module: str) -> None:
    """Raise ConfigError if the package of a module is missing. Imports nothing."""
    # find_spec of a submodule would import its parents.
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise ConfigError(f"{setting}: {module!r} cannot be imported, package {package!r} is not installed: {REMEDY}")


def check_names(settings: BaseModel) -> None:
    """Refuse names of engines, providers, trackers, losses and transports that are not registered. Imports no packages of theirs.

    Args:
        settings: settings of a run or of the service, whose plug-ins have been imported.

    Raises:
        ConfigError: a name is unknown; the message has those that are known.
    """
    engine, provider = getattr(settings, "engine", None), getattr(settings, "provider", None)
    objective, sync = getattr(settings, "objective", None), getattr(settings, "sync", None)
    if engine is not None:
        check_registered("engine", engine, ENGINES, "megascend.register_engine")
    if provider is not None and ":" in provider:
        check_module("provider", provider.partition(":")[0])
    elif provider is not None:
        check_registered("provider", provider, PROVIDERS, "megascend.register_provider")
    if objective is not None:
        check_registered(
            "loss of sampled responses",
            objective.loss,
            POLICY_LOSSES,
            "megascend.register_loss",
            setting="objective.loss",
        )
    if sync is not None:
        transports = ["auto", *transport_names()]
        check_registered(
            "transport",
            sync.transport,
            transports,
            "weightwire.transports.register_transport",
            setting="sync.transport",
        )
    check_tracker_names(getattr(settings, "tracker_options", ()))


def check_registered(kind: str, name: str, names: Sequence[str], register: str, setting: str | None = None) -> None:
    """Raise ConfigError if ``name`` is not among ``names``.

    Args:
        register: function that registers another one.
    """
    if name not in names:
        matches = get_close_matches(name, names, 1)
        advice = f", did you mean {matches[0]}? Known" if matches else "; known"
        raise ConfigError(
            f"{setting or kind}: unknown {kind} {name!r}{advice}: {', '.join(names)}. Register yours on every rank "
            f"({register}; a run file names the module under plugins)"
        )


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
