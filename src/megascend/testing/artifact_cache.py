"""Outputs of slow helper processes, cached on this machine for the next test run: references and tiny checkpoints.

An entry's name is a digest of all that decides its content: what it is made from, the program that makes it, the versions of the
packages which that program uses, and the kind of processor, on which roundings depend. An entry holds its own digest, so that a
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

from megascend.runtime.io import paths, shared
from megascend.runtime.io.hashing import cache_key

PACKAGES = ("torch", "transformers", "peft", "safetensors")
LIMIT_BYTES = 256 * 2**20
"""Size of all entries together, beyond which :func:`megascend.runtime.io.shared.prune` removes some. A test run needs 60 MiB."""


def folder() -> Path:
    """Return ``references`` in ``MEGASCEND_CACHE`` or in the user's cache."""
    return paths.cache_folder() / "references"


def copy_or_make(
    name: str, made_from: Mapping[str, Any], program: Path, target: Path, make: Callable[[Path], object]
) -> None:
    """Write ``target``, a new file or directory: a copy of the cached entry, else what ``make`` writes, which is then cached.

    If the cache cannot be written, a warning says so, and ``make`` runs.

    Args:
        name: begins the entry's name.
        made_from: all that ``program`` reads, as plain values; of files their digests and not their paths.
        program: the script that ``make`` runs.
        make: writes the path that it is given.
    """
    entry = folder() / f"{name}-{key(made_from, program)}"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"{entry.parent} cannot be written ({error}): {name} is made again by every run", stacklevel=2)
        make(target)
        return
    # Held while copying too: another process could drop the entry.
    with shared.locked(entry):
        if _copied(entry, target):
            return
        make(target)
        try:
            shared.replace(entry, lambda fresh: _pack(target, fresh))
            shared.prune(entry.parent, LIMIT_BYTES, keep=entry)
        except OSError as error:
            warnings.warn(f"{entry} cannot be written ({error}): {name} is made again by the next run", stacklevel=2)


def key(made_from: Mapping[str, Any], program: Path) -> str:
    """Return a digest of everything that decides an entry's content."""
    parts = {"from": made_from, "program": hashlib.sha256(program.read_bytes()).hexdigest(), "on": _environment()}
    return cache_key(parts)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a directory's files and their names."""
    total = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        total.update(json.dumps([str(file.relative_to(path)), len(content)]).encode())
        total.update(content)
    return total.hexdigest()


@functools.cache
def _environment() -> list[str]:
    import torch

    versions = [f"{package} {metadata.version(package)}" for package in PACKAGES]
    # The instruction set decides the order of summation, and so the last bits of a reference.
    return [*versions, platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()]


def _pack(source: Path, entry: Path) -> None:
    entry.mkdir()
    _copy(source, entry / "content")
    (entry / "sha256").write_text(digest(entry / "content"), encoding="utf-8")


def _copied(entry: Path, target: Path) -> bool:
    """Copy an entry to ``target``; leave nothing there if the entry is missing or damaged."""
    try:
        _copy(entry / "content", target)
        if digest(target) == (entry / "sha256").read_text(encoding="utf-8"):
            os.utime(entry)  # marks the use, for prune()
            return True
    except (OSError, shutil.Error):  # missing, or another process has just dropped it
        pass
    paths.remove(target)
    return False


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(source, target)
