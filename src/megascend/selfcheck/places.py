"""Where verdicts are kept, and of which packages they are; imports nothing of those."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from megascend.io import paths

PACKAGES = ("torch", "transformers", "megatron-core", "mcore-bridge")


def cache_folder() -> Path:
    """``self-check`` in the folder of :func:`megascend.io.paths.cache_folder`."""
    return paths.cache_folder() / "self-check"


def versions(packages: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions of ``packages``, by default of :data:`PACKAGES`."""
    return {name: metadata.version(name) for name in (PACKAGES if packages is None else packages)}
