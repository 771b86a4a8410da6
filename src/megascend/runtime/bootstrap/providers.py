"""Patch providers, which prepare a process for Megatron-Core on a device: their interface and registry.

A provider is chosen by name (``bootstrap(provider=...)``, ``provider:`` in a run file); a platform's default is the first one
registered for it and for the installed row of the version table. A provider from outside the package is registered with
:func:`register`, or given by its import path (``my_package.my_module:MyProvider``), which needs no call before
``megascend train``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megascend.config.registry import PROVIDERS, ProviderEntry, load
from megascend.errors import ConfigError, PlatformError, VersionError
from megascend.runtime.bootstrap.patches import CLIPPING, patch_gradient_clipping
from megascend.surroundings import is_installed

if TYPE_CHECKING:
    from megascend.config import Batching, Parallel
    from megascend.runtime.bootstrap.versions import Stack
    from megascend.runtime.platforms.base import Platform
    from megascend.runtime.topology.topology import Topology


@dataclass(frozen=True)
class ProviderSetup:
    """Arguments of a provider's constructor, known before Megatron is imported.

    Attributes:
        parallel: the layout, as far as it is known this early; providers may depend on its context parallelism.
    """

    platform: Platform
    stack: Stack
    parallel: Parallel


@dataclass(frozen=True)
class Finding:
    """Result of the check of one prerequisite: its state, and the problem with its remedy; empty if there is none."""

    name: str
    state: str
    problem: str = ""


class PatchProvider(ABC):
    """Provider that makes Megatron-Core run on a device, by replacing parts of it or of its dependencies.

    The methods that patch are listed in the order of the bootstrap's calls; ``for_topology`` and ``for_model`` are called
    again for another model or layout in the same process. Each returns one line for every change, for ``Runtime.changes``.

    Attributes:
        name: registered name.
        must_come_first: megatron.core, transformer_engine and mcore_bridge must not be imported before it.
        keeps_groups_in: modules whose globals hold process groups of its own; these get the run's timeout, and are cleared
            when all groups are destroyed.
    """

    name: ClassVar[str]
    must_come_first: ClassVar[bool] = True
    keeps_groups_in: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setup: ProviderSetup) -> None:
        self.setup = setup

    @abstractmethod
    def before_megatron(self) -> list[str]:
        """Patch, before anything else imports megatron.core, transformer_engine or mcore_bridge.

        Raises:
            PlatformError, VersionError: something is missing or does not fit; nothing has been changed.
        """

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        """Return functions that patch a module right after its import, by the module's name. Called once.

        A module that is imported already is patched at the end of the bootstrap.
        """
        return {}

    def after_megatron(self) -> list[str]:
        """Patch after a megascend engine has imported megatron.core and mcore_bridge.

        Not called for other programs on Megatron-Core: patches that those need belong in :meth:`when_imported`.
        """
        return []

    def for_topology(self, topology: Topology) -> list[str]:
        """Patch before the process groups of ``topology`` are created."""
        return []

    def for_model(self, config: Any, options: Mapping[str, Any]) -> list[str]:
        """Patch for a model, after its ModelConfig exists and before it is built; then verify the patches.

        Args:
            config: mcore-bridge's ModelConfig; attributes that the provider's classes read are set on it.
            options: the user's settings for the provider (``provider_options``).

        Raises:
            ConfigError: the provider does not support this model or these options.
            PlatformError: a check failed; the message names it.
        """
        refuse_options(options, f"provider {self.name!r} has none")
        return []

    def check_batching(self, topology: Topology, batching: Batching) -> None:
        """Raise ConfigError for a form of micro batches that this provider's layers compute wrongly on ``topology``."""
        return

    def adam_count(self, optimizer: Any, count: int) -> Any:
        """Return the number of updates ``count`` in the type in which ``optimizer``, Megatron's Adam, stores it."""
        return count

    # --- queries that do not prepare the process ---

    def findings(self, before_each: Callable[[str], object] = lambda name: None) -> list[Finding]:
        """Check every prerequisite in this process, for ``megascend doctor``; check the others even if one fails.

        Args:
            before_each: called with the name of the next prerequisite, which identifies a check that ends the process.
        """
        return []

    def versions(self) -> dict[str, str]:
        """Return versions, read from files, of the provider's packages that are not in the version table; for reports."""
        return {}


ProviderFactory = Callable[[ProviderSetup], PatchProvider]


def register(
    name: str, factory: ProviderFactory | str, platforms: Sequence[str] = (), packages: Sequence[str] = ()
) -> None:
    """Register a provider under a name that the setting ``provider`` then accepts. Call it before the bootstrap.

    Args:
        factory: a :class:`PatchProvider` class, or a function from a :class:`ProviderSetup` to a provider; or its import path,
            ``module:attribute``.
        platforms: names of supported platforms; default: all.
        packages: top-level packages that it imports and that patch other packages at their import: the self-check's worker
            process hides them.

    Raises:
        ConfigError: the name is taken by another factory, or looks like an import path.
    """
    if not name or ":" in name:
        raise ConfigError(f"a provider cannot be called {name!r}: a colon marks an import path")
    PROVIDERS.add(name, ProviderEntry(factory, tuple(platforms), tuple(packages)))


def suits(entry: ProviderEntry, platform: str, stack: str | None = None) -> bool:
    """Check whether a provider supports the platform of this name, and the row of the version table if one is given."""
    return (not entry.platforms or platform in entry.platforms) and (
        stack is None or not entry.stacks or stack in entry.stacks
    )


def names(platform: str | None = None, stack: str | None = None) -> list[str]:
    """Return the names of all providers, or of those for one platform and row of the version table, the default first."""
    return [name for name, entry in PROVIDERS.items() if platform is None or suits(entry, platform, stack)]


def packages() -> list[str]:
    """Return the top-level packages that registered providers import and that patch other packages."""
    return list(dict.fromkeys(package for entry in PROVIDERS.values() for package in entry.packages))


def create(name: str | None, setup: ProviderSetup) -> PatchProvider:
    """Create the provider ``name``, or the default one of the platform and the stack, without patching anything."""
    platform, stack = setup.platform.name, setup.stack.name
    if name is None:
        suitable = names(platform, stack)
        if not suitable:
            raise ConfigError(
                f"no provider is registered for platform {platform!r} and stack {stack}; registered: {', '.join(names())}"
            )
        name = suitable[0]
    # An import path comes without platforms, so it suits all of them.
    entry = ProviderEntry(name) if ":" in name else PROVIDERS.require(name)
    if not suits(entry, platform):
        raise ConfigError(
            f"provider {name!r} is for platform {', '.join(entry.platforms)}, and this process runs on {platform!r}; providers "
            f"for {platform!r}: {', '.join(names(platform)) or 'none'}"
        )
    if not suits(entry, platform, stack):
        raise VersionError(
            f"provider {name!r} is for stack {' or '.join(entry.stacks)}, and stack {stack} is installed; providers for it on "
            f"{platform!r}: {', '.join(names(platform, stack)) or 'none'}"
        )
    try:
        factory = load(entry.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"provider: {entry.factory!r} cannot be found: {error}") from error
    provider = factory(setup)
    # An external factory may return anything; a missing method would fail only after part of the patching.
    if not isinstance(provider, PatchProvider):
        raise ConfigError(
            f"provider {name!r}: its factory returned a {type(provider).__name__}, not a megascend.PatchProvider"
        )
    return provider


def provider_for(platform: str) -> PatchProvider:
    """Create the provider for a platform that need not be available here, for queries that do not prepare the process."""
    from megascend.config import Parallel
    from megascend.runtime.bootstrap.versions import installed_versions, nearest_stack
    from megascend.runtime.platforms import load

    return create(None, ProviderSetup(load(platform), nearest_stack(installed_versions()), Parallel()))


def refuse_options(options: Mapping[str, Any], because: str) -> None:
    """Raise ConfigError if ``options`` is not empty."""
    if options:
        raise ConfigError(f"provider_options: {', '.join(sorted(options))} set, but {because}; leave them empty")


class TransformerEngine(PatchProvider):
    name: ClassVar[str] = "transformer_engine"
    # It replaces no class; it sets an environment variable, which only has to precede the first use of the device.
    must_come_first: ClassVar[bool] = False

    def before_megatron(self) -> list[str]:
        if not is_installed("transformer_engine"):
            raise PlatformError(
                "platform 'cuda' needs Transformer Engine: pip install --no-build-isolation 'transformer-engine[pytorch]', or, "
                "slower, set MEGASCEND_REFERENCE_TE=1"
            )
        self.setup.platform.has_transformer_engine_kernels = True
        return one_connection(os.environ)

    def when_imported(self) -> dict[str, Callable[[], list[str]]]:
        return {CLIPPING: patch_gradient_clipping}


def one_connection(environment: MutableMapping[str, str]) -> list[str]:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS=1`` unless it is set: Megatron-Core's overlaps rely on that order of kernels."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        return []
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
