"""Requirements of each engine on its process. One engine's patches must not be in another engine's process."""

from __future__ import annotations

from dataclasses import dataclass

from megascend.config.registry import ENGINES
from megascend.runtime.bootstrap.versions import PACKAGES

DEFAULT = "megatron"
MEGATRON_CORE = "megatron-core"
"""Stands for third-party programs on Megatron-Core, which do not need mcore-bridge; not for run files."""


@dataclass(frozen=True)
class EngineNeeds:
    """Requirements of an engine.

    Attributes:
        megatron: as of :class:`megascend.config.registry.EngineEntry`.
        packages: packages of the version table that must be installed in a supported version.
    """

    megatron: bool
    packages: tuple[str, ...]


def needs(name: str) -> EngineNeeds:
    """Return the requirements of the engine ``name``."""
    if name == MEGATRON_CORE:
        return EngineNeeds(megatron=True, packages=("torch", "megatron-core"))
    entry = ENGINES.require(name)
    return EngineNeeds(entry.megatron, PACKAGES if entry.megatron else entry.packages)
