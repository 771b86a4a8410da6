"""A run's output directory: files of earlier runs, detection of a run in progress, and the time from which this run may write.

An earlier run's files are removed all together or not at all.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.train.event_log import ERRORS, EVENTS, read_lines
from megascend.config import TrainerConfig
from megascend.errors import ConfigError, redacted
from megascend.runtime.io.atomic import NOT_RENAMED, entries, replacing
from megascend.runtime.io.paths import is_kept, make_directory, remove
from megascend.runtime.io.shared import hold
from megascend.surroundings import process_lives
from megascend.training.checkpoint.retention import LATEST, LEFT_OVER, NAME, Retention

if TYPE_CHECKING:
    from megascend.apps.train.event_log import EventLog
    from megascend.backend import Backend

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""File in the output directory with a line for each step."""
CHECKPOINTS = "checkpoints"
"""Directory in the output directory with the run's checkpoints."""
RUN_FILES = (
    METRICS, "rollouts.jsonl", "rollouts.1.jsonl", "config.yaml", "metrics.png", "hf", "adapter", "tensorboard",
    CHECKPOINTS, EVENTS, ERRORS, "non_finite", "profile", "trackers",
)  # fmt: skip
"""Everything a run writes into its output directory."""
JOURNAL = (EVENTS, ERRORS)
"""Files that record how earlier attempts ended."""
RESULTS = tuple(name for name in RUN_FILES if name not in JOURNAL)
WITHOUT_STEPS = (*JOURNAL, "config.yaml", METRICS, "rollouts.jsonl", "tensorboard", "trackers", CHECKPOINTS)
"""Files that may exist after a run that failed in its first step."""
EXPORTS = {"hf": "config.json", "adapter": "adapter_config.json"}
"""Exported directories, and the file by which each is recognised."""
MOVING, REMOVING = ".earlier-run", ".earlier-run-gone"
"""Directories in the output directory for an earlier run's files: one while files are moved there, the other during removal."""
LOCK = ".lock"
"""File in the output directory that rank 0 of a run in progress has locked."""
LOCK_WAIT_S = 1.0
"""Seconds to wait for that lock: a start that only checks it holds it for a moment."""
SHARED_WAIT_S = 10.0
"""Seconds until a file written by another host must be visible here."""


@dataclass
class OutputDirectory:
    """The output directory of a run whose start point is decided. Methods are collective.

    Attributes:
        earlier_files: names of an earlier run's files, to be removed.
        holds_earlier_run: they are kept until this run has completed a step; until then nothing may be written here.
        on_take_over: called once, when the directory is this run's.
    """

    config: TrainerConfig
    backend: Backend
    event_log: EventLog
    earlier_files: tuple[str, ...] = ()
    holds_earlier_run: bool = False
    on_take_over: Callable[[], object] = lambda: None
    _owned: bool = field(default=False, init=False)

    def take_over(self) -> None:
        """Remove an earlier run's files and write the settings: this run has completed a step, or saves one. Idempotent."""
        if self._owned:
            return
        self._owned = True
        if self.holds_earlier_run:
            self.clear()
            self.holds_earlier_run = False
        self.on_take_over()
        if self.backend.rank == 0:
            write_config(self.config)
        self.event_log.write_pending()

    def clear(self) -> None:
        """Remove the earlier run's files."""

        def clear() -> None:
            if self.holds_earlier_run:
                refuse_running(self.config.output)  # another run may have started there since
            try:
                clear_output(self.config.output, self.earlier_files)
            except OSError as error:
                raise ConfigError(
                    f"output: the earlier run's files in {self.config.output} cannot be removed: {error}"
                ) from error

        if self.earlier_files:
            self.backend.from_rank_0(clear)


def write_config(config: TrainerConfig) -> None:
    """Write the resolved settings, without passwords, to ``config.yaml``. A failure, such as a full disk, is logged only."""
    import yaml

    try:
        make_directory(config.output)
        with replacing(config.output / "config.yaml") as fresh:
            fresh.write_text(
                yaml.safe_dump(redacted(config.model_dump(mode="json")), sort_keys=False), encoding="utf-8"
            )
    except OSError as error:
        logger.warning("%s cannot be written: %s", config.output / "config.yaml", error)


def lock_output(output: Path, stack: ExitStack) -> None:
    """Lock an output directory until the stack is closed, which removes the lock's file, or this process ends.

    Unlike the process id in the event log, the lock also shows runs in other containers and, on file systems that share locks
    (NFS, Lustre with ``flock``), on other hosts. A file system without locks is logged.
    """
    path = output / LOCK
    try:
        make_directory(output)
        stack.callback(hold(path, LOCK_WAIT_S).release)
        # Before the release, so that no other run's lock is removed. A start that has just opened the removed file locks nothing
        # that others see: for that moment there is refuse_running().
        stack.callback(remove, path)
    except TimeoutError:
        holder = ""
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8").strip()
        raise ConfigError(
            f"output: {output} is being written by another run, {holder or 'which has not written its name'}: stop it, or, if "
            f"its host has failed, remove {path}"
        ) from None
    except OSError as error:
        logger.warning(
            "output: %s cannot be locked (%s): a run there from another container or host is not noticed", output, error
        )
        return
    with suppress(OSError):  # a full disk: the lock holds without the name
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")


def refuse_locked(output: Path) -> None:
    """Raise ConfigError if another process has locked an output directory; not while this one has."""
    if (output / LOCK).exists():
        with ExitStack() as stack:
            lock_output(output, stack)


# --- files of an earlier run ---


def refuse_earlier_run(output: Path) -> None:
    files = run_files(output)
    if files:
        advice = "resume it with --resume auto, " if Retention(output / CHECKPOINTS).steps() else ""
        raise ConfigError(
            f"output: {output} holds an earlier run ({', '.join(files)}); {advice}choose another with --set output=PATH, or "
            "replace it with --overwrite"
        )


def run_files(output: Path) -> list[str]:
    """Return the names of a run's files in ``output`` that must not be lost.

    Empty if no run has completed a step there: attempts that never began leave errors only, and a run that failed in its first
    step may be started again.
    """
    files = [name for name in RUN_FILES if (output / name).exists()]
    # A first start often fails on a setting, and must not need --overwrite afterwards.
    if files == [ERRORS] or (set(files) <= set(WITHOUT_STEPS) and failed_in_step_1(output)):
        return []
    return files


def failed_in_step_1(output: Path) -> bool:
    """Return True if the last run in ``output`` has certainly ended, without a logged or saved step."""
    checkpoints = output / CHECKPOINTS
    if read_lines(output / METRICS)[0] or (checkpoints.is_dir() and any(checkpoints.iterdir())):
        return False
    starts = [event for event in read_lines(output / EVENTS)[0] if event.get("event") == "start"]
    if not starts:
        return False
    host, pid, since, start_ticks = (starts[-1].get(name) for name in ("host", "pid", "time", "start_ticks"))
    if not isinstance(since, (int, float)):
        return False
    # `is False`: None means a process on another host, whose run may be alive.
    return error_since(output, since) or process_lives(host, pid, since, start_ticks) is False


def refuse_running(output: Path) -> None:
    """Raise ConfigError if another process is running in a directory, as far as this host can see."""
    events = read_lines(output / EVENTS)[0]
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    if not starts:
        return
    start, later = events[starts[-1]], events[starts[-1] + 1 :]
    host, pid, since, start_ticks = (start.get(name) for name in ("host", "pid", "time", "start_ticks"))
    # A run that ended by itself has logged that; for one that was killed, look for its process.
    if pid == os.getpid() or any(event.get("event") in ("finished", "stopped") for event in later):
        return
    if process_lives(host, pid, since, start_ticks) and not error_since(output, since):
        raise ConfigError(
            f"output: {output} is being written by another run, process {pid} on {host}: stop it first, or choose another with "
            "--set output=PATH"
        )


def error_since(output: Path, since: Any) -> bool:
    """Return True if a rank of the run in ``output`` has left an error at ``since`` or later."""
    errors = [error for path in (output / ERRORS).glob("*.json") for error in read_lines(path)[0]]
    # A start that was refused because that run is in progress leaves an error, too.
    return any(
        isinstance(error.get("time"), (int, float)) and error["time"] >= since and error.get("started") is not False
        for error in errors
    )


# --- removing them ---


def clear_output(output: Path, names: Sequence[str]) -> None:
    """Remove the files ``names`` that an earlier run left in ``output``, and nothing else.

    If the process is killed, :func:`restore` puts them back. Mount points, and links to checkpoints, exports and files, are kept,
    but emptied of the run's files. Links to other directories are removed; their targets are kept.

    Raises:
        OSError: they cannot be removed; those that were moved have been put back.
    """
    present = [output / name for name in names if os.path.lexists(output / name)]
    kept_paths = [path for path in present if is_kept(path)]
    # Two directories: restore() puts files back from the first, and completes the removal of the second.
    moving, removing = output / MOVING, output / REMOVING
    remove(removing)
    moving.mkdir()
    try:
        for path in present:
            if path in kept_paths:
                continue
            try:
                # A rename is atomic, and works on a full disk.
                os.replace(path, moving / path.name)
            except OSError as error:
                # A mount point cannot be renamed; its content is removed below instead.
                if error.errno not in NOT_RENAMED or not path.is_dir():
                    raise
                kept_paths.append(path)
        os.replace(moving, removing)
    except OSError:
        restore(output)
        raise
    # Only after this rename, which is never undone, may files be removed for good.
    for path in kept_paths:
        _empty(path)
    remove(removing)


def restore(output: Path) -> None:
    """Clean up after a process that was killed within :func:`clear_output`: put moved files back, or complete the removal."""
    remove(output / REMOVING)
    moving = output / MOVING
    if moving.is_dir():
        for entry in moving.iterdir():
            # An existing file of the same name is newer.
            if not os.path.lexists(output / entry.name):
                os.replace(entry, output / entry.name)
        remove(moving)


def _empty(path: Path) -> None:
    """Remove a run's files behind a link or a mount point, as far as they can be distinguished from those of others.

    Checkpoints and exports are recognised by their files. A link to any other directory, such as a ``tensorboard`` that several
    runs share, is removed, and its target is kept.
    """
    if path.is_file():
        # A link to a file stays a link: the user has put the file on another disk.
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


# --- several hosts ---


def check_shared(backend: Backend, output: Path) -> None:
    """Refuse an output directory that the hosts of a run do not share. Collective; on one host it does nothing.

    Every rank writes its part of a checkpoint there, and rank 0 the manifest.
    """
    if not backend.groups.launch.several_hosts:
        return
    from megascend.runtime.distributed.objects import (
        gather_objects,  # imports torch, which reading a run file does not need
    )

    def mark() -> str:
        make_directory(output)
        # A new name each time: a network file system may remember an old one.
        name = f".shared-{secrets.token_hex(4)}"
        (output / name).touch()
        return name

    name = backend.from_rank_0(mark)
    try:
        reports = gather_objects(
            (socket.gethostname(), _appears(output / name)), "world", backend.groups, "check_shared()"
        )
    finally:
        if backend.rank == 0:
            (output / name).unlink(missing_ok=True)
    if problem := not_shared(output, reports):
        raise ConfigError(problem)


def not_shared(output: Path, reports: list[tuple[str, bool]]) -> str | None:
    """Return an error message if some rank does not see rank 0's file, else None. Pure.

    Args:
        reports: each rank's host, and True if it sees the file.
    """
    blind: dict[str, list[int]] = {}
    for rank, (host, sees) in enumerate(reports):
        if not sees:
            blind.setdefault(host, []).append(rank)
    if not blind:
        return None
    hosts = ", ".join(
        f"{host} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})" for host, ranks in blind.items()
    )
    return (
        f"output: {output.absolute()} on {reports[0][0]} (rank 0) is another directory than on {hosts}. Every rank writes its "
        "part of a checkpoint there: set output to a directory that all hosts share (NFS, Lustre...), at the same path on each"
    )


def _appears(path: Path) -> bool:
    until = time.monotonic() + SHARED_WAIT_S
    # Network file systems cache that a name does not exist.
    while not path.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
    return True
