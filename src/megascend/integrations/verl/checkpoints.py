"""Where the engine's checkpoints lie in verl's directories, and which of them are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

STATE, HF_MODEL = "megascend", "huggingface"
"""Below verl's directory of a checkpoint: the backend's own, and the Hugging Face export."""


class Kept:
    """Directories that this run has written, oldest first; older ones than ``limit`` are deleted, as verl's engines do."""

    def __init__(self) -> None:
        self._written: list[Path] = []

    def add(self, directory: Path, limit: int | None) -> list[Path]:
        """Note a complete checkpoint; the ones that are too many now."""
        if directory in self._written:
            self._written.remove(directory)
        self._written.append(directory)
        if not limit or limit < 0:
            return []
        surplus, self._written = self._written[:-limit], self._written[-limit:]
        return surplus


def delete(directories: list[Path]) -> None:
    """Remove whole checkpoints, verl's own files in them included."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=False)
