"""Faults to inject: ranks that die, stop, hang, skip or raise at a named place, and disks that are full or damaged.

    from megascend.testing import faults, run_distributed

    with faults.inject(faults.Fault("die", rank=1, phase="grad reduce", step=3)):
        results = run_distributed(train, 2, init=False, expect_lost={1})

A rank fires its fault when it enters the phase. Phases are those of :meth:`megascend.diagnostics.hang_monitor.Watch.phase`:
``start-up``, ``build``, ``forward and backward`` and in it ``forward`` (every micro batch), ``forward only``,
``object gather``, ``grad reduce``, ``update``, ``save``, ``write``, ``load``, ``export``, ``save adapter``, ``load adapter``, and
those that a trainer marks itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from megascend.errors import ConfigError, PlatformError

VARIABLE = "MEGASCEND_FAULTS"
Action = Literal["die", "stop", "hang", "skip", "raise"]
MOUNT_S = 10.0
"""Seconds that a mount may take."""


@dataclass(frozen=True)
class Fault:
    """What one rank does when it enters a phase. Fires once in a process.

    Attributes:
        action: ``die`` (SIGKILL itself), ``stop`` (SIGSTOP itself), ``hang`` (sleep for ever, in Python), ``skip`` (the
            phase's body does not run; only where that returns nothing: ``grad reduce``), ``raise`` (a RuntimeError).
        rank: global rank.
        phase: name of the phase.
        step: number of the optimizer step, from 1; None: any.
        attempt: how often torchrun must have restarted the run (``--max-restarts``).

    Raises:
        ConfigError: a value cannot be.
    """

    action: Action
    rank: int
    phase: str
    step: int | None = None
    attempt: int = 0

    def __post_init__(self) -> None:
        actions = get_args(Action)
        if self.action not in actions:
            raise ConfigError(f"fault: action must be one of {', '.join(actions)}, got {self.action!r}")
        numbers = {"rank": (self.rank, 0), "attempt": (self.attempt, 0)}
        if self.step is not None:
            numbers["step"] = self.step, 1
        for name, (value, least) in numbers.items():
            if type(value) is not int or value < least:
                raise ConfigError(f"fault: {name} must be a whole number from {least}, got {value!r}")
        if not isinstance(self.phase, str) or not self.phase:
            raise ConfigError(f"fault: phase must be a name, got {self.phase!r}")

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.action} in {self.phase}{step} on rank {self.rank}"


# --- arming ---


def environment(*faults: Fault) -> dict[str, str]:
    """The variable that arms ``faults``, for the ``env`` of a subprocess."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Arm ``faults`` for this process and its children until the block ends.

    A process arms them when it creates its process groups, and says so on stderr.
    """
    before = os.environ.get(VARIABLE)
    os.environ.update(environment(*faults))
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def read(text: str) -> list[Fault]:
    """The inverse of :func:`environment`.

    Raises:
        ConfigError: ``text`` is not a JSON list of faults.
    """
    try:
        return [Fault(**values) for values in json.loads(text)]
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError too
        raise ConfigError(f"{VARIABLE}={text!r} cannot be read: {error}") from error


class Armed:
    """The faults of this rank, for the monitor."""

    def __init__(self, faults: list[Fault]) -> None:
        self.waiting = faults

    @classmethod
    def from_text(cls, text: str, rank: int, attempt: int) -> Armed | None:
        """Those of ``rank`` in this attempt; None if there are none.

        Raises:
            ConfigError: see :func:`read`.
        """
        mine = [fault for fault in read(text) if fault.rank == rank and fault.attempt == attempt]
        return cls(mine) if mine else None

    def __str__(self) -> str:
        return ", ".join(str(fault) for fault in self.waiting)

    def fire(
        self,
        phase: str,
        step: int,
        *,
        skippable: bool,
        publish: Callable[[], None],
        quiet: Callable[[], AbstractContextManager[object]],
    ) -> bool:
        """Do what is armed for ``phase``; True if its body is to be skipped.

        Args:
            publish: tells the other ranks where this one is, as they would know had it been there for a moment.
            quiet: a lock that keeps this process's threads out of the store: stopped inside, it would stop the others too.

        Raises:
            RuntimeError: the fault ``raise``.
            ConfigError: this phase cannot be skipped.
        """
        fault = next((f for f in self.waiting if f.phase == phase and f.step in (None, step)), None)
        if fault is None:
            return False
        self.waiting.remove(fault)
        _disarm(fault)
        if fault.action == "skip":
            if not skippable:
                raise ConfigError(f"fault: the phase {phase!r} cannot be skipped: what it returns is needed")
            return True
        if fault.action == "raise":
            raise RuntimeError(f"injected fault: {fault}")
        publish()
        if fault.action == "hang":
            hang()
        with quiet():
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "die" else signal.SIGSTOP)
        return False


def hang() -> None:
    """Sleep for ever, in Python."""
    while True:
        time.sleep(3600)


def _disarm(fault: Fault) -> None:
    """So that it fires once, even if this process makes its groups anew."""
    text = os.environ.get(VARIABLE)
    if text:
        faults = read(text)
        if fault in faults:
            faults.remove(fault)
        os.environ.update(environment(*faults))


# --- files ---


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
        offset: from the beginning, in bytes; default: the middle of the file.

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
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return offset


@contextmanager
def full_disk(size_bytes: int) -> Iterator[Path]:
    """A directory on a file system of its own of ``size_bytes`` (rounded up to pages): a tmpfs, gone after the block.

    Raises:
        PlatformError: this user can mount one neither directly nor in a user namespace.
    """
    with tempfile.TemporaryDirectory(prefix="megascend-disk-") as folder:
        mount = f'mount -t tmpfs -o size={int(size_bytes)},mode=777 tmpfs "$1"'
        with _mounted(mount, Path(folder)) as seen:
            yield seen


@contextmanager
def read_only(path: str | Path) -> Iterator[Path]:
    """The directory ``path``, mounted read-only, so that root cannot write to it either, until the block ends.

    Yields where to see it so: ``path`` itself where this user can mount; else, from a user namespace, another path to the
    same files, while ``path`` itself stays writable.

    Raises:
        PlatformError: as :func:`full_disk`.
    """
    with _mounted('mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"', Path(path).resolve()) as seen:
        yield seen


@contextmanager
def _mounted(script: str, folder: Path) -> Iterator[Path]:
    """Run a shell script that mounts something on ``folder`` ("$1"); yields the path at which this process sees it."""
    direct = subprocess.run(
        ["sh", "-c", script, "sh", str(folder)], capture_output=True, text=True, timeout=MOUNT_S, check=False
    )
    if direct.returncode == 0:
        try:
            yield folder
        finally:  # --lazy: a process that a test left behind may have a file open there
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=MOUNT_S)
        return
    with _mounted_in_namespace(script, folder, direct.stderr.strip()) as seen:
        yield seen


@contextmanager
def _mounted_in_namespace(script: str, folder: Path, why_not_directly: str) -> Iterator[Path]:
    """The same as root of a new user namespace. The mount lives as long as its process, through which it is seen."""
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
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
        )
    except FileNotFoundError as error:
        raise PlatformError(f"cannot mount on {folder}: {why_not_directly}; and there is no unshare command") from error
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        answer = keeper.stdout.readline().strip()
        if answer != "ready":
            raise PlatformError(
                f"cannot mount on {folder}: {why_not_directly}; and in a user namespace: {answer or 'no answer'}"
            )
        yield Path(f"/proc/{keeper.pid}/root{folder}")
    finally:
        keeper.stdin.close()  # ends cat, and with it the namespace and its mounts
        keeper.stdout.close()
        keeper.wait(MOUNT_S)
