"""The files that an earlier run has left in an output directory: they are removed together, or stay as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megascend.checkpoint.retention import LATEST, LEFT_OVER, NAME
from megascend.io.atomic import NOT_RENAMED, entries
from megascend.io.paths import remove, stays

CHECKPOINTS = "checkpoints"
"""In the output directory: the series of a run's checkpoints."""
GOING, GONE = ".earlier-run", ".earlier-run-gone"
"""In the output directory: the files while they are being moved away, and while they are being removed."""
EXPORTS = {"hf": "config.json", "adapter": "adapter_config.json"}
"""What a run exports, and the file by which that is known."""


def clear_output(output: Path, names: Sequence[str]) -> None:
    """Remove the files ``names`` that an earlier run left in ``output``, and nothing else.

    If the process is killed meanwhile, :func:`restore` puts them back. Mount points, and links to checkpoints, exports and files,
    stay: what a run has put behind them is removed. Links to other directories are removed, and nothing behind them.

    Raises:
        OSError: they cannot be removed; those that were moved are back.
    """
    present = [output / name for name in names if os.path.lexists(output / name)]
    staying = [path for path in present if stays(path)]
    going, gone = output / GOING, output / GONE
    remove(gone)
    going.mkdir()
    try:
        for path in present:
            if path in staying:
                continue
            try:
                os.replace(path, going / path.name)
            except OSError as error:
                if error.errno not in NOT_RENAMED or not path.is_dir():
                    raise
                staying.append(path)
        os.replace(going, gone)
    except OSError:
        restore(output)
        raise
    for path in staying:
        _empty(path)
    remove(gone)


def restore(output: Path) -> None:
    """Put back what a process that was killed within :func:`clear_output` had moved away, and remove what it had not."""
    remove(output / GONE)
    going = output / GOING
    if going.is_dir():
        for entry in going.iterdir():
            if not os.path.lexists(output / entry.name):
                os.replace(entry, output / entry.name)
        remove(going)


def _empty(path: Path) -> None:
    """Remove what a run has put behind a link or a mount point, as far as that can be told from what belongs to others.

    Checkpoints and exports are known by their files. Of other directories, such as a ``tensorboard`` that several runs share,
    a link is removed and what it leads to stays.
    """
    if path.is_file():
        os.truncate(path, 0)
    elif not path.is_dir():
        remove(path)
    elif path.name == CHECKPOINTS:
        for entry in entries(path):
            if entry.name == LATEST or NAME.fullmatch(entry.name) or LEFT_OVER.fullmatch(entry.name):
                remove(entry)
    elif path.name in EXPORTS:
        if (path / EXPORTS[path.name]).is_file():
            for entry in entries(path):
                remove(entry)
    elif path.is_symlink():
        remove(path)
    else:  # a mount point below the run's own output
        for entry in entries(path):
            remove(entry)
