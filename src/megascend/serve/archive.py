"""A checkpoint as one file to download."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import IO


def pack(directory: Path) -> IO[bytes]:
    """An archive (tar, gzip) of the files in a directory, and of nothing that lies elsewhere: no links, no directories.

    It says nothing of who owns them here.

    Returns:
        A temporary file without a name, at its end.
    """
    packed = tempfile.TemporaryFile(suffix=".tar.gz")  # noqa: SIM115  the answer reads it
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for file in sorted(directory.iterdir()):
            if file.is_file() and not file.is_symlink():
                tar.add(file, file.name, recursive=False, filter=_plain)
    return packed


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """None for what is no file after all; hard links are files."""
    if not (entry.isfile() or entry.islnk()):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
