"""Requirements of each engine on its process. One engine's patches must not be in another engine's process.

``megascend.register_engine`` registers those of an engine from outside the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascend.errors import ConfigError
from megascend.runtime.bootstrap.versions import PACKAGES

DEFAULT = "megatron"
MEGATRON_CORE = "megatron-core"


@dataclass(frozen=True)
class EngineNeeds:
    """Requirements of an engine.

    Attributes:
        megatron: the engine runs on Megatron-Core, so a provider patches it for the platform. For other engines nothing is
            patched, replaced or redirected, and Megatron is not imported.
        packages: packages of the version table that must be installed in a supported version.
    """

    megatron: bool
    packages: tuple[str, ...]


_registry = {
    "megatron": EngineNeeds(megatron=True, packages=PACKAGES),
    # Third-party programs on Megatron-Core, which do not need mcore-bridge.
    MEGATRON_CORE: EngineNeeds(megatron=True, packages=("torch", "megatron-core")),
    "single": EngineNeeds(megatron=False, packages=("torch", "transformers", "peft")),
    "fsdp": EngineNeeds(megatron=False, packages=("torch", "transformers")),
}


def register(name: str, megatron: bool, packages: Sequence[str] = ("torch", "transformers")) -> None:
    """Make an engine known to the bootstrap.

    Args:
        megatron: as in :class:`EngineNeeds`.
        packages: as in :class:`EngineNeeds`; ignored with ``megatron``, which needs all packages of the table.

    Raises:
        ConfigError: the name is taken by an engine with other needs, or a package is not in the table.
    """
    from megascend.config.plugins import ENGINES

    unknown = sorted(set(packages) - set(PACKAGES))
    if unknown:
        raise ConfigError(
            f"engine {name!r}: the version table has no {', '.join(unknown)}; it has {', '.join(PACKAGES)}"
        )
    entry = EngineNeeds(megatron, PACKAGES if megatron else tuple(packages))
    if _registry.get(name, entry) != entry:
        raise ConfigError(f"engine {name!r} is registered already, with other needs: {_registry[name]}")
    _registry[name] = entry
    if name not in ENGINES:
        ENGINES.append(name)


def names() -> list[str]:
    """Return the names of the registered engines, without the entry for third-party programs."""
    return [name for name in _registry if name != MEGATRON_CORE]


def needs(name: str) -> EngineNeeds:
    """Return the requirements of the engine ``name``."""
    if name not in _registry:
        raise ConfigError(f"unknown engine {name!r}; known: {', '.join(names())}")
    return _registry[name]
