"""What prepares a process for Megatron-Core on a device: the interface, and the registry of those there are.

A provider is chosen by name (``bootstrap(provider=...)``, ``provider:`` in a run file); a platform's default is the first one
that is registered for it. One from outside the package is registered with :func:`register`, or named by where it is found
(``my_package.my_module:MyProvider``), which needs no call before ``megascend train``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.errors import ConfigError, PlatformError
from megascend.surroundings import is_installed

if TYPE_CHECKING:
    from megascend.bootstrap.versions import Stack
    from megascend.config import Batching, Parallel, Precision
    from megascend.platforms.base import Platform
    from megascend.topology.topology import Topology


@dataclass(frozen=True)
class Setup:
    """What a provider is told when it is made, before Megatron is imported.

    Attributes:
        platform: the platform in use.
        stack: the row of the version table in use.
        parallel: the layout, as far as it is known this early; its context parallelism is what may matter here.
        precision: of the model, or None if it has not been said yet.
    """

    platform: Platform
    stack: Stack
    parallel: Parallel
    precision: Precision | None = None


@dataclass(frozen=True)
class Finding:
    """What became of one prerequisite: ``problem`` says what to do, and is empty if it holds."""

    name: str
    found: str
    problem: str = ""


class PatchProvider(ABC):
    """What makes Megatron-Core run on a device, by replacing parts of it or standing in for what it needs.

    The methods that patch come in the order in which the bootstrap calls them; ``for_topology`` and ``for_model`` are called
    again for another model or layout in the same process. Each returns one line for every change made, for
    ``Runtime.changes``.

    Attributes:
        name: under which it is registered.
        must_come_first: megatron.core, transformer_engine and mcore_bridge must not be imported before it.
        keeps_groups_in: modules with globals in which it keeps process groups of its own; they get the run's timeout, and are
            forgotten with the rest.
    """

    name: ClassVar[str]
    must_come_first: ClassVar[bool] = True
    keeps_groups_in: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def before_megatron(self) -> list[str]:
        """Patch, before anything else imports megatron.core, transformer_engine or mcore_bridge.

        Raises:
            PlatformError, VersionError: something is missing or does not fit; nothing has been changed.
        """

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        """What to patch as soon as a module is imported, whoever imports it, by the module's name; asked for once.

        For modules that are imported when the bootstrap is done, at its end.
        """
        return {}

    def after_megatron(self) -> list[str]:
        """When a program that uses megascend's engine has imported megatron.core and mcore_bridge.

        Other programs on Megatron-Core never come here: what they need as well belongs into :meth:`when_imported`.
        """
        return []

    def for_topology(self, topology: Topology) -> list[str]:
        """Before the process groups of ``topology`` are created."""
        return []

    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        """When the ModelConfig exists and before the model is built; then check that all is as it must be.

        Args:
            config: mcore-bridge's ModelConfig; attributes that the provider's classes read are set on it.
            options: settings of the provider's own that the user asked for (``provider_options``).

        Raises:
            ConfigError: the provider would get this model or these options wrong.
            PlatformError: a check failed; the message says which.
        """
        refuse_options(options, f"provider {self.name!r} has none")
        return []

    def check_batching(self, topology: Topology, batching: Batching) -> None:
        """Raise ConfigError for a form of micro batches that this provider's layers compute wrongly on ``topology``."""
        return

    def adam_count(self, optimizer: Any, count: int) -> Any:
        """``count`` of updates in the form in which ``optimizer``, the Adam that Megatron has made, keeps it."""
        return count

    # --- what can be asked without preparing anything ---

    def findings(self, before_each: Callable[[str], object] = lambda name: None) -> list[Finding]:
        """Every prerequisite held against this process, for ``megascend doctor``; one that fails hides no other.

        Args:
            before_each: called with the name of what is looked at next: should that end the process, it is known what did.
        """
        return []

    def versions(self) -> dict[str, str]:
        """Versions of the packages it brings beside those of the version table, read from files; for reports."""
        return {}


ProviderFactory = Callable[[Setup], PatchProvider]


@dataclass(frozen=True)
class ProviderEntry:
    """One provider of the registry.

    Attributes:
        factory: makes it; or where it is found, as ``module:attribute``.
        platforms: names of those it can be used on; empty: all.
        packages: top-level packages that it imports and that patch others, or are found by others, once they are there.
    """

    factory: ProviderFactory | str
    platforms: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def suits(self, platform: str) -> bool:
        """Whether it can be used on the platform of this name."""
        return not self.platforms or platform in self.platforms


_registry: dict[str, ProviderEntry] = {
    "mindspeed": ProviderEntry("megascend.bootstrap.mindspeed:MindSpeed", ("npu",), ("mindspeed",)),
    "transformer_engine": ProviderEntry("megascend.bootstrap.providers:TransformerEngine", ("cuda",)),
    "reference": ProviderEntry("megascend.bootstrap.reference:Reference", ("cpu", "cuda")),
}


def register(
    name: str, factory: ProviderFactory | str, platforms: Sequence[str] = (), packages: Sequence[str] = ()
) -> None:
    """Make a provider known, under a name that ``provider`` then accepts. Call it before the bootstrap.

    Args:
        factory: a :class:`PatchProvider` class, or anything that makes one of a :class:`Setup`; or where that is found, as
            ``module:attribute``.
        platforms: names of those it can be used on; default: all.
        packages: top-level packages that it imports and that patch others once they are imported: a check of the model on
            the CPU, in a process of its own, hides them.

    Raises:
        ConfigError: the name is taken by another factory, or cannot be told from a place.
    """
    if not name or ":" in name:
        raise ConfigError(f"a provider cannot be called {name!r}: a colon says where one is found")
    entry = ProviderEntry(factory, tuple(platforms), tuple(packages))
    if _registry.get(name, entry) != entry:
        raise ConfigError(f"provider {name!r} is registered already; choose another name than {', '.join(_registry)}")
    _registry[name] = entry


def names(platform: str | None = None) -> list[str]:
    """Names of the providers there are, or of those for one platform, its default first."""
    return [name for name, entry in _registry.items() if platform is None or entry.suits(platform)]


def packages() -> list[str]:
    """Top-level packages that the registered providers import and that patch others."""
    return [package for entry in _registry.values() for package in entry.packages]


def create(name: str | None, setup: Setup) -> PatchProvider:
    """The provider called ``name``, or the default one of the platform; nothing is patched yet."""
    platform = setup.platform.name
    if name is None:
        suitable = names(platform)
        if not suitable:
            raise ConfigError(f"no provider is registered for platform {platform!r}; registered: {', '.join(names())}")
        name = suitable[0]
    if ":" in name:
        entry = ProviderEntry(name)
    elif name not in _registry:
        raise ConfigError(
            f"provider: there is no {name!r}; there are {', '.join(names())} (for platform {platform!r}: "
            f"{', '.join(names(platform))}), and one of your own as package.module:attribute"
        )
    else:
        entry = _registry[name]
    if not entry.suits(platform):
        raise ConfigError(
            f"provider {name!r} is for platform {', '.join(entry.platforms)}, and this process runs on {platform!r}, for "
            f"which there are {', '.join(names(platform))}"
        )
    made = (_found(entry.factory) if isinstance(entry.factory, str) else entry.factory)(setup)
    if not isinstance(made, PatchProvider):
        raise ConfigError(f"provider {name!r}: its factory made a {type(made).__name__}, not a megascend.PatchProvider")
    return made


def provider_for(platform: str, name: str | None = None) -> PatchProvider:
    """The provider for a platform that need not be available here, for what can be asked without preparing anything."""
    from megascend.bootstrap.versions import installed_versions, nearest_stack
    from megascend.config import Parallel
    from megascend.platforms import load

    return create(name, Setup(load(platform), nearest_stack(installed_versions()), Parallel()))


def refuse_options(options: Mapping[str, Any], because: str) -> None:
    """Raise ConfigError if there are any."""
    if options:
        raise ConfigError(f"provider_options: {', '.join(sorted(options))} set, but {because}; leave them empty")


def _found(where: str) -> ProviderFactory:
    module, _, attribute = where.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"provider: {where!r} cannot be found: {error}") from error


class TransformerEngine(PatchProvider):
    name: ClassVar[str] = "transformer_engine"
    must_come_first: ClassVar[bool] = False

    def before_megatron(self) -> list[str]:
        if not is_installed("transformer_engine"):
            raise PlatformError(
                "platform 'cuda' needs Transformer Engine: pip install --no-build-isolation "
                "'transformer-engine[pytorch]'. To run with megascend's slower reference implementation instead, "
                "set MEGASCEND_REFERENCE_TE=1."
            )
        self.setup.platform.has_transformer_engine_kernels = True
        return one_connection(os.environ)


def one_connection(environment: MutableMapping[str, str]) -> list[str]:
    """``CUDA_DEVICE_MAX_CONNECTIONS=1`` where it is not set: the order of kernels that Megatron-Core's overlaps rely on."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        return []
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
