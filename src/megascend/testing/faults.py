"""Faults to inject: ranks that die, stop, hang, skip or raise at a named place, and disks that are full or damaged.

    from megascend.testing import faults, run_distributed

    with faults.inject(faults.Fault("die", rank=1, phase="grad reduce", step=3)):
        results = run_distributed(train, 2, init=False, expect_lost={1})

A rank fires its fault when it enters the phase. Phases are those of
:meth:`megascend.runtime.diagnostics.hang_monitor.HangMonitor.phase`:
``start-up``, ``build``, ``forward and backward`` and in it ``forward`` (every micro batch), ``forward only``,
``object gather``, ``grad reduce``, ``update``, ``save``, ``write``, ``load``, ``export``, ``save adapter``, ``load adapter``, and
those that a trainer marks itself.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megascend.errors import ConfigError, PlatformError
from megascend.runtime.diagnostics.faults import VARIABLE, Fault, environment, inject

__all__ = ["VARIABLE", "Fault", "environment", "flip_byte", "full_disk", "inject", "read_only", "truncate"]

MOUNT_S = 10.0
"""Seconds that a mount may take."""


def truncate(path: str | Path, keep_bytes: int) -> None:
    """Cut a file off after its first ``keep_bytes`` bytes, as a crash during writing does.

    Raises:
        ConfigError: it is not longer than that.
    """
    size = Path(path).stat().st_size
    if not 0 <= keep_bytes < size:
        raise ConfigError(f"truncate: {path} has {size} bytes; cannot keep {keep_bytes} of them and lose some")
    os.truncate(path, keep_bytes)


def flip_byte(path: str | Path, offset: int | None = None) -> int:
    """Invert one byte of a file; size and times stay. Returns its offset.

    Args:
        offset: offset in bytes; default: the middle of the file.

    Raises:
        ConfigError: the file has no such byte.
    """
    status = os.stat(path)
    offset = status.st_size // 2 if offset is None else offset
    if not 0 <= offset < status.st_size:
        raise ConfigError(f"flip_byte: {path} has {status.st_size} bytes, none at {offset}")
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0xFF]))
    # Damage on a disk does not change times either; a cache keyed by them must not notice.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return offset


@contextmanager
def full_disk(size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of ``size_bytes`` (rounded up to pages) for the block, and yield its directory.

    Raises:
        PlatformError: this user can mount one neither directly nor in a user namespace.
    """
    with tempfile.TemporaryDirectory(prefix="megascend-disk-") as folder:
        mount = f'mount -t tmpfs -o size={int(size_bytes)},mode=777 tmpfs "$1"'
        with _mounted(mount, Path(folder)) as path:
            yield path


@contextmanager
def read_only(path: str | Path) -> Iterator[Path]:
    """Mount the directory ``path`` read-only for the block, so that root cannot write to it either.

    Yields where to see it so: ``path`` itself where this user can mount; else, from a user namespace, another path to the
    same files, while ``path`` itself stays writable.

    Raises:
        PlatformError: as :func:`full_disk`.
    """
    with _mounted('mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"', Path(path).resolve()) as mounted:
        yield mounted


@contextmanager
def _mounted(script: str, folder: Path) -> Iterator[Path]:
    """Run a shell script that mounts something on ``folder`` ("$1"); yields the path at which this process sees it."""
    direct = subprocess.run(
        ["sh", "-c", script, "sh", str(folder)],
        capture_output=True,
        text=True,
        timeout=MOUNT_S,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    if direct.returncode == 0:
        try:
            yield folder
        finally:  # --lazy: a process that a test left behind may have a file open there
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=MOUNT_S)
        return
    with _mounted_in_namespace(script, folder, direct.stderr.strip()) as mounted:
        yield mounted


@contextmanager
def _mounted_in_namespace(script: str, folder: Path, mount_error: str) -> Iterator[Path]:
    """Mount as root of a new user namespace. The mount lives as long as its process, through which it is seen."""
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        # cat keeps the namespace alive until its standard input is closed, which a death of this process does too.
        f"{script} && echo ready && exec cat",
        "sh",
    ]
    try:
        keeper = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise PlatformError(f"cannot mount on {folder}: {mount_error}; and there is no unshare command") from error
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        answer = keeper.stdout.readline().strip()
        if answer != "ready":
            raise PlatformError(
                f"cannot mount on {folder}: {mount_error}; and in a user namespace: {answer or 'no answer'}"
            )
        yield Path(f"/proc/{keeper.pid}/root{folder}")
    finally:
        keeper.stdin.close()  # ends cat, and with it the namespace and its mounts
        keeper.stdout.close()
        keeper.wait(MOUNT_S)
