"""Where verdicts are kept, and of which packages they are; imports nothing of those."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from megascend import files

PACKAGES = ("torch", "transformers", "megatron-core", "mcore-bridge")


def cache_folder() -> Path:
    """``self-check`` in the folder of :func:`megascend.files.cache_folder`."""
    return files.cache_folder() / "self-check"


def versions() -> dict[str, str]:
    """Of :data:`PACKAGES`."""
    return {name: metadata.version(name) for name in PACKAGES}
