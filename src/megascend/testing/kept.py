"""What slow helper processes made, kept on this machine for the next test run: references and tiny checkpoints.

An entry's name is a digest of all that decides its content: what it is made from, the program that makes it, the versions of the
packages which that program uses, and the kind of processor, on which roundings depend. It lies beside its own digest, so that a
damaged one is noticed and made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megascend.selfcheck.check import cache_folder
from megascend.testing.cached import alone, replace

PACKAGES = ("torch", "transformers", "peft", "safetensors")
LIMIT_BYTES = 256 * 2**20
"""Size of all entries together; past it those go that were not used for the longest time. A test run needs about 60 MiB."""


def folder() -> Path:
    """``references`` beside the verdicts of the self-check: in ``MEGASCEND_CACHE`` or in the user's cache."""
    return cache_folder().parent / "references"


def kept(name: str, made_from: Mapping[str, Any], program: Path, target: Path, make: Callable[[Path], object]) -> None:
    """Write ``target``, a new file or directory: a copy of what was kept, else what ``make`` writes, which is then kept.

    A cache that cannot be written is warned of, and ``make`` runs.

    Args:
        name: begins the entry's name.
        made_from: all that ``program`` reads, as plain values; of files their digests and not their paths.
        program: the script that ``make`` runs.
        make: writes the path that it is given.

    Raises:
        DistributedTestError: another process has been making the same for ten minutes.
    """
    entry = folder() / f"{name}-{key(made_from, program)}"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"{entry.parent} cannot be written ({error}): {name} is made again by every run", stacklevel=2)
        make(target)
        return
    with alone(entry):
        if _copied(entry, target):
            return
        make(target)
        try:
            replace(entry, lambda fresh: _pack(target, fresh))
            _drop_oldest(entry.parent)
        except OSError as error:
            warnings.warn(f"{entry} cannot be written ({error}): {name} is made again by the next run", stacklevel=2)


def key(made_from: Mapping[str, Any], program: Path) -> str:
    """A digest of everything that decides an entry's content."""
    parts = {"from": made_from, "program": hashlib.sha256(program.read_bytes()).hexdigest(), "on": _surroundings()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def digest(path: Path, without: tuple[str, ...] = ()) -> str:
    """SHA-256 of a file, or of a directory's files and their names, but those named in ``without``."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = hashlib.sha256()
    for file in files:
        if file.name not in without:
            content = file.read_bytes()
            found.update(json.dumps([str(file.relative_to(path)), len(content)]).encode())
            found.update(content)
    return found.hexdigest()


@functools.cache
def _surroundings() -> list[str]:
    import torch

    versions = [f"{package} {metadata.version(package)}" for package in PACKAGES]
    return [*versions, platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()]


def _pack(made: Path, entry: Path) -> None:
    entry.mkdir()
    _copy(made, entry / "content")
    (entry / "sha256").write_text(digest(entry / "content"), encoding="utf-8")


def _copied(entry: Path, target: Path) -> bool:
    """Copy an entry to ``target``; nothing is there afterwards if the entry is missing or damaged."""
    try:
        _copy(entry / "content", target)
        if digest(target) == (entry / "sha256").read_text(encoding="utf-8"):
            os.utime(entry)
            return True
    except (OSError, shutil.Error):  # not there, or another process has just dropped it
        pass
    _remove(target)
    return False


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _drop_oldest(entries: Path) -> None:
    """Remove what was not used for the longest time until the rest fits in :data:`LIMIT_BYTES`."""
    with alone(entries):
        found = [(entry.stat().st_mtime, entry) for entry in entries.iterdir() if not entry.name.startswith(".")]
        room = LIMIT_BYTES
        for _, entry in sorted(found, reverse=True):
            room -= sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            if room < 0:
                shutil.rmtree(entry, ignore_errors=True)
