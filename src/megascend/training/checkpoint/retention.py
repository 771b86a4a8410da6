"""The checkpoints of one run: list them, find the latest, and remove superseded ones.

DIRECTORY/step-00000100/    a complete checkpoint; it appears only when it is complete
DIRECTORY/latest            the name of one of them
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascend.runtime.io.atomic import replacing
from megascend.training.checkpoint import manifest

LATEST = "latest"
NAME = re.compile(r"step-([0-9]{8,})")
LEFT_OVER = re.compile(rf"\.{NAME.pattern}\.(writing|old|removing)")
"""Directories left behind by a killed process; see the saver, ``replace_directory`` and :meth:`Retention.committed`."""


@dataclass(frozen=True)
class Retention:
    """A directory of checkpoints.

    Attributes:
        keep_last: number of the newest checkpoints to keep.
        keep_every: checkpoints whose step is a multiple of this are never removed; 0: none.
    """

    directory: Path
    keep_last: int = 2
    keep_every: int = 0

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint after ``step`` steps, which may not exist."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return [step for step in self._named_steps() if (self.path(step) / manifest.NAME).exists()]

    def latest(self) -> int | None:
        """Return the step that ``latest`` names, or None if the file is missing or names no checkpoint."""
        try:
            step = self._step(((self.directory / LATEST).read_text(encoding="utf-8")).strip())
        except (OSError, UnicodeDecodeError):  # missing or damaged: the checkpoints themselves are unaffected
            return None
        return step if step is not None and self.path(step).is_dir() else None

    def candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, best first; last those without a manifest, whose loading reports the problem."""
        best = by_preference(self.steps(), self.latest())
        return [
            self.path(step) for step in [*best, *(step for step in reversed(self._named_steps()) if step not in best)]
        ]

    def committed(self, path: Path, keep: Collection[int] = ()) -> None:
        """Point ``latest`` to a checkpoint that has just been completed, and remove superseded ones.

        Args:
            keep: steps of checkpoints to keep whatever their age.

        Raises:
            OSError: the file cannot be written. The checkpoint itself is complete.
        """
        with replacing(self.directory / LATEST, durable=True) as fresh:
            fresh.write_text(path.name + "\n", encoding="utf-8")
        for entry in list(self.directory.iterdir()):
            if LEFT_OVER.fullmatch(entry.name):
                _remove(entry, entry)
        current = int(path.name.removeprefix("step-"))
        old = [step for step in self.steps() if step not in keep]
        for step in superseded(old, current, self.keep_last, self.keep_every):
            # Renamed before it is removed: an interrupted removal must not leave a partial checkpoint under a valid name.
            _remove(self.path(step), self.directory / f".{self.path(step).name}.removing")

    def _named_steps(self) -> list[int]:
        """Return the steps of all directories that have the name of a checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        steps = [self._step(entry.name) for entry in self.directory.iterdir() if entry.is_dir()]
        return sorted(step for step in steps if step is not None)

    def _step(self, name: str) -> int | None:
        match = NAME.fullmatch(name)
        # Only names in the spelling of path(); others could not be found by it.
        return int(match[1]) if match and self.path(int(match[1])).name == name else None


def _remove(path: Path, under: Path) -> None:
    """Rename a directory to ``under``, and remove it. A failure is logged, not raised: the next save retries."""
    try:
        if path != under:
            os.replace(path, under)
        if under.is_symlink():
            under.unlink()  # the link only, not its target
        else:
            shutil.rmtree(under)
    except OSError as error:
        logging.getLogger(__name__).error("%s cannot be removed: %s", path, error)


def by_preference(steps: Sequence[int], latest: int | None) -> list[int]:
    """Order steps: ``latest``, earlier ones newest first, then later ones, which a rolled-back run has left. Pure."""
    if latest is None:
        return sorted(steps, reverse=True)
    before = sorted((step for step in steps if step <= latest), reverse=True)
    after = sorted((step for step in steps if step > latest), reverse=True)
    # First even if it is incomplete: loading it reports why.
    return [*([] if latest in before else [latest]), *before, *after]


def superseded(steps: Sequence[int], current: int, keep_last: int, keep_every: int) -> list[int]:
    """Return the steps to remove once step ``current`` is complete; later ones are not touched. Pure."""
    old = sorted(step for step in steps if step <= current)
    return [step for step in old[: max(0, len(old) - keep_last)] if not (keep_every and step % keep_every == 0)]
