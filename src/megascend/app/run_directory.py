"""A run's output directory: what earlier runs have left there, whether one of them is at work, and when this run may write.

The files of an earlier run are removed together, or stay as they are.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.app.event_log import ERRORS, EVENTS, read_lines
from megascend.checkpoint.retention import LATEST, LEFT_OVER, NAME, Retention
from megascend.config import TrainerConfig
from megascend.errors import ConfigError
from megascend.io.atomic import NOT_RENAMED, entries, replacing
from megascend.io.paths import is_kept, make_directory, remove
from megascend.surroundings import process_lives

if TYPE_CHECKING:
    from megascend.app.event_log import EventLog
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
"""Files that a run leaves if it fails in its first step."""
EXPORTS = {"hf": "config.json", "adapter": "adapter_config.json"}
"""Exported directories, and the file by which each is recognised."""
MOVING, REMOVING = ".earlier-run", ".earlier-run-gone"
"""Directories in the output directory for an earlier run's files: while they are moved there, and while they are removed."""
SHARED_WAIT_S = 10.0
"""Seconds until a file written by another host is visible here: network file systems cache that a name does not exist."""


@dataclass
class OutputDirectory:
    """The output directory from the moment at which a run knows where it begins. Methods are collective.

    Attributes:
        cleared: files of an earlier run, to be removed.
        waiting: they are still there until this run has done a step, and nothing may be written to the directory.
    """

    config: TrainerConfig
    backend: Backend
    event_log: EventLog
    cleared: tuple[str, ...] = ()
    waiting: bool = False
    _owned: bool = field(default=False, init=False)

    def take_over(self) -> None:
        """Make the directory this run's own, which has done a step or has something to keep. Once."""
        if self._owned:
            return
        self._owned = True
        if self.waiting:
            self.clear()
            self.waiting = False
        if self.backend.rank == 0:
            write_config(self.config)
        self.event_log.write_waiting()

    def clear(self) -> None:
        """Remove the earlier run's files."""

        def clear() -> None:
            if self.waiting:
                refuse_running(self.config.output)  # it may have begun since
            try:
                clear_output(self.config.output, self.cleared)
            except OSError as error:
                raise ConfigError(
                    f"output: the earlier run's files in {self.config.output} cannot be removed: {error}"
                ) from error

        if self.cleared:
            self.backend.from_rank_0(clear)


def write_config(config: TrainerConfig) -> None:
    """Write the resolved settings beside the results. Without room for them, the run continues."""
    import yaml

    try:
        make_directory(config.output)
        with replacing(config.output / "config.yaml") as fresh:
            fresh.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written: %s", config.output / "config.yaml", error)


# --- what an earlier run has left ---


def refuse_earlier_run(output: Path) -> None:
    """Raise ConfigError if a directory holds a run."""
    files = run_files(output)
    if files:
        advice = "resume it with --resume auto, " if Retention(output / CHECKPOINTS).steps() else ""
        raise ConfigError(
            f"output: {output} holds an earlier run ({', '.join(files)}); {advice}choose another with --set output=PATH, or "
            "replace it with --overwrite"
        )


def run_files(output: Path) -> list[str]:
    """Return what a run has left in ``output`` that must not be lost.

    Nothing, where no run has taken a step: errors alone are of attempts that never began, and one that has failed in its first
    step may be tried again.
    """
    files = [name for name in RUN_FILES if (output / name).exists()]
    # A first start often fails on a setting, and must not need --overwrite afterwards.
    if files == [ERRORS] or (set(files) <= set(WITHOUT_STEPS) and failed_in_step_1(output)):
        return []
    return files


def failed_in_step_1(output: Path) -> bool:
    """Return True if the last run in ``output`` has surely ended, without a step that is logged or saved."""
    checkpoints = output / CHECKPOINTS
    if read_lines(output / METRICS)[0] or (checkpoints.is_dir() and any(checkpoints.iterdir())):
        return False
    starts = [event for event in read_lines(output / EVENTS)[0] if event.get("event") == "start"]
    if not starts:
        return False
    since = starts[-1].get("time")
    if not isinstance(since, (int, float)):
        return False
    # is False: a process of another host is unknown, and its run may be alive.
    return error_since(output, since) or process_lives(starts[-1].get("host"), starts[-1].get("pid"), since) is False


def refuse_running(output: Path) -> None:
    """Raise ConfigError if a run of another process is at work in a directory, as far as can be told on this machine."""
    events = read_lines(output / EVENTS)[0]
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    if not starts:
        return
    start, later = events[starts[-1]], events[starts[-1] + 1 :]
    host, pid, since = (start.get(name) for name in ("host", "pid", "time"))
    # A run that has ended wrote so; one that was killed did not, hence the look at its process.
    if pid == os.getpid() or any(event.get("event") in ("finished", "stopped") for event in later):
        return
    if process_lives(host, pid, since) and not error_since(output, since):
        raise ConfigError(
            f"output: {output} is being written by another run, process {pid} on {host}: stop it first, or choose another with "
            "--set output=PATH"
        )


def error_since(output: Path, since: Any) -> bool:
    """Return True if a rank of the run in ``output`` has left an error at ``since`` or later."""
    errors = [error for path in (output / ERRORS).glob("*.json") for error in read_lines(path)[0]]
    return any(isinstance(error.get("time"), (int, float)) and error["time"] >= since for error in errors)


# --- removing it ---


def clear_output(output: Path, names: Sequence[str]) -> None:
    """Remove the files ``names`` that an earlier run left in ``output``, and nothing else.

    If the process is killed meanwhile, :func:`restore` puts them back. Mount points, and links to checkpoints, exports and files,
    stay, and what a run has written behind them is removed. Links to other directories are removed; their targets stay.

    Raises:
        OSError: they cannot be removed; those that were moved are back.
    """
    present = [output / name for name in names if os.path.lexists(output / name)]
    kept_paths = [path for path in present if is_kept(path)]
    # Two names: a restart must know whether the removal had been decided (gone) or was under way (going).
    moving, removing = output / MOVING, output / REMOVING
    remove(removing)
    moving.mkdir()
    try:
        for path in present:
            if path in kept_paths:
                continue
            try:
                # A rename: all of it is there or none, and it needs no room on a full disk.
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
    # After the rename: from here on the removal is completed, and what cannot be put back may be touched.
    for path in kept_paths:
        _empty(path)
    remove(removing)


def restore(output: Path) -> None:
    """Put back what a process that was killed within :func:`clear_output` had moved away, and remove what it had not."""
    remove(output / REMOVING)
    going = output / MOVING
    if going.is_dir():
        for entry in going.iterdir():
            # A file of the same name that is there already is newer.
            if not os.path.lexists(output / entry.name):
                os.replace(entry, output / entry.name)
        remove(going)


def _empty(path: Path) -> None:
    """Remove what a run has put behind a link or a mount point, as far as that can be told from what belongs to others.

    Checkpoints and exports are known by their files. Of other directories, such as a ``tensorboard`` that several runs share,
    a link is removed and what it leads to is_kept.
    """
    if path.is_file():
        # A link to a file is_kept a link: the user has put it there for the room on its disk.
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

    Every rank writes its part of a checkpoint there, and rank 0 puts the manifest beside them.
    """
    if not backend.groups.launch.several_hosts:
        return
    from megascend.distributed.objects import gather_objects  # imports torch, which reading a run file does not need

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
    """Return what is wrong if a rank does not see rank 0's file. Pure.

    Args:
        reports: by rank, its host and True if it sees the file.
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
