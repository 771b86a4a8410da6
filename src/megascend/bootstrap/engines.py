"""What each engine needs of the process that it runs in. One engine's patches must not be in another's process.

``megascend.register_engine`` says it of an engine from outside the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascend.bootstrap.versions import PACKAGES
from megascend.errors import ConfigError

DEFAULT = "megatron"
MEGATRON_CORE = "megatron-core"


@dataclass(frozen=True)
class EngineNeeds:
    """What an engine needs.

    Attributes:
        megatron: it runs on Megatron-Core, so a provider patches what this platform needs for it. For others nothing is
            patched, stood in for or redirected, and Megatron is not imported.
        packages: of the version table, those that have to be installed in a version that was seen to work.
    """

    megatron: bool
    packages: tuple[str, ...]


_registry = {
    "megatron": EngineNeeds(megatron=True, packages=PACKAGES),
    # Programs of others on Megatron-Core, which need nothing of mcore-bridge's.
    MEGATRON_CORE: EngineNeeds(megatron=True, packages=("torch", "megatron-core")),
    "single": EngineNeeds(megatron=False, packages=("torch", "transformers", "peft")),
    "fsdp": EngineNeeds(megatron=False, packages=("torch", "transformers")),
}


def register(name: str, megatron: bool, packages: Sequence[str] = ("torch", "transformers")) -> None:
    """Make an engine known to the bootstrap.

    Args:
        megatron: as in :class:`EngineNeeds`.
        packages: as in :class:`EngineNeeds`; with ``megatron`` all of the table, whatever is given.

    Raises:
        ConfigError: the name is taken by an engine with other needs, or a package is not in the table.
    """
    from megascend.config.plugins import ENGINES

    unknown = sorted(set(packages) - set(PACKAGES))
    if unknown:
        raise ConfigError(
            f"engine {name!r}: the version table has no {', '.join(unknown)}; it has {', '.join(PACKAGES)}"
        )
    wanted = EngineNeeds(megatron, PACKAGES if megatron else tuple(packages))
    if _registry.get(name, wanted) != wanted:
        raise ConfigError(f"engine {name!r} is registered already, with other needs: {_registry[name]}")
    _registry[name] = wanted
    if name not in ENGINES:
        ENGINES.append(name)


def names() -> list[str]:
    """Names of the engines there are; programs of others on Megatron-Core have none."""
    return [name for name in _registry if name != MEGATRON_CORE]


def needs(name: str) -> EngineNeeds:
    """What the engine called ``name`` needs."""
    if name not in _registry:
        raise ConfigError(f"engine: there is no {name!r}; there are {', '.join(names())}")
    return _registry[name]
