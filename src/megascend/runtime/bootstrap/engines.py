"""Requirements of each engine on its process. One engine's patches must not be in another engine's process."""

from __future__ import annotations

from dataclasses import replace

from megascend.config.registry import ENGINES, EngineEntry
from megascend.runtime.bootstrap.versions import PACKAGES

DEFAULT = "megatron"
MEGATRON_CORE = "megatron-core"
"""Stands for third-party programs on Megatron-Core, which do not need mcore-bridge; not for run files."""


def needs(name: str) -> EngineEntry:
    """Return the requirements of the engine ``name``, with all of its packages."""
    if name == MEGATRON_CORE:
        return EngineEntry("", megatron=True, packages=("torch", "megatron-core"))
    entry = ENGINES.require(name)
    return replace(entry, packages=PACKAGES) if entry.megatron else entry
