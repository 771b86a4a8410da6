"""Report what happened to a run from the files in its directory, for ``megascend doctor --run``. Imports no torch.

Every file may be missing, truncated or damaged; the readable parts are reported.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megascend.apps.train.event_log import ERRORS, EVENTS, read_lines
from megascend.apps.train.run_directory import CHECKPOINTS, METRICS
from megascend.errors import CheckpointError, ConfigError
from megascend.surroundings import process_lives
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import NAME, Retention

Outcome = Literal["finished", "stopped", "interrupted", "error", "lost", "no end"]
SECONDARY = ("PeerLostError", "CollectiveTimeoutError", "ProcessGroupError", "DistBackendError")
"""Errors that usually follow from another rank's failure."""
TRACES = (EVENTS, METRICS, CHECKPOINTS, ERRORS)
"""Files and folders that identify the directory of a run."""
SLACK_S = 5.0
"""Tolerated difference between the clocks of two machines, in seconds."""


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank. ``step``: which it was working on; 0: none yet."""

    rank: int
    step: int
    error: str
    message: str
    time: float
    host: str


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run.

    Attributes:
        number: counted from 1.
        restart: number of automatic restarts by torchrun before this attempt.
        started: seconds since the epoch; None if it failed before the first step.
        resumed_after: the step of the checkpoint that it resumed from; 0: from the beginning.
        outcome: ``interrupted``: by a second Ctrl-C, without a checkpoint; ``error``: a rank raised an error; ``lost``: other
            ranks report ranks that disappeared without an error; ``no end``: no record of an end, because it is still running or
            was killed as a whole.
        step: the step after which it finished or was stopped, or in which the error occurred; None if unknown.
        errors: the ranks' recorded errors, the cause first.
        silent: ranks that disappeared without an error.
        process: host and process id of rank 0.
        start_ticks: :func:`megascend.surroundings.process_start` of that process.
    """

    number: int = 0
    restart: int
    started: float | None
    world_size: int | None
    resumed_after: int
    ended: float | None
    outcome: Outcome
    step: int | None
    signal: str | None
    errors: tuple[RankError, ...]
    silent: tuple[int, ...]
    process: tuple[str, int] | None
    platform: str | None
    command: tuple[str, ...]
    directory: str | None
    start_ticks: int | None

    @property
    def running(self) -> bool:
        """True if rank 0's process is alive on this machine."""
        if self.outcome != "no end" or self.process is None:
            return False
        return process_lives(*self.process, self.started or 0.0, self.start_ticks) is True


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint directory and its problems, as far as it was checked."""

    step: int
    name: str
    size_bytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class SaveCounts:
    """Counts of the saves of all attempts. ``stall_s``: seconds that each blocked training, on rank 0."""

    started: int
    completed: int
    failures: tuple[str, ...]
    stall_s: tuple[float, ...]


@dataclass(frozen=True)
class RunReport:
    """Contents of a run's files.

    Attributes:
        steps: number of steps that the run was configured for; None if unknown.
        metrics: rows of metrics.jsonl, cut-off lines left out.
        checkpoints: checkpoints by step, ascending.
        verified: the digests of all files were compared.
        unfinished: directories of saves that were interrupted.
        remarks: files that could not be read in full.
    """

    directory: Path
    steps: int | None
    attempts: tuple[Attempt, ...]
    metrics: tuple[dict[str, Any], ...]
    checkpoints: tuple[CheckpointEntry, ...]
    latest: str | None
    verified: bool
    unfinished: tuple[str, ...]
    saves: SaveCounts
    bad_batches: tuple[str, ...]
    exported: tuple[str, ...]
    free_bytes: int
    remarks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the run has finished, or was stopped on purpose."""
        return bool(self.attempts) and self.attempts[-1].outcome in ("finished", "stopped")

    @property
    def running(self) -> bool:
        return bool(self.attempts) and self.attempts[-1].running

    @property
    def last_good(self) -> CheckpointEntry | None:
        """Return the checkpoint that ``--resume auto`` will resume from, as far as the files were checked."""
        intact = {checkpoint.name: checkpoint for checkpoint in self.checkpoints if not checkpoint.problems}
        # The order in which `--resume auto` tries them.
        candidates = Retention(self.directory / CHECKPOINTS).candidates()
        return next((intact[path.name] for path in candidates if path.name in intact), None)


def read_run(directory: Path, *, verify: bool = False) -> RunReport:
    """Read a run's directory.

    Args:
        verify: compare every file of every checkpoint with its digest; else their manifests are looked at.
    """
    if not directory.is_dir():
        raise ConfigError(f"--run {directory}: not a directory; name the output directory of a run")
    if not any((directory / name).exists() for name in TRACES):
        raise ConfigError(
            f"--run {directory}: no run has written to this directory: it has none of {', '.join(TRACES)}"
        )
    events, remarks = read_lines(directory / EVENTS)
    metrics, cut = read_lines(directory / METRICS)
    last: dict[tuple[Any, ...], dict[str, Any]] = {}  # the last error of a process is the one that ended it
    for path in sorted((directory / ERRORS).glob("*.json")):
        records, problems = read_lines(path)
        # By start time as well, because process ids are reused, in containers from restart to restart.
        last |= {(path.name, record.get("host"), record.get("pid"), record.get("since")): record for record in records}
        remarks += problems
    starts = [event for event in events if event.get("event") == "start"]
    return RunReport(
        directory=directory,
        steps=next((event["steps"] for event in reversed(starts) if isinstance(event.get("steps"), int)), None),
        attempts=tuple(attempts_of(events, list(last.values()))),
        metrics=tuple(row for row in metrics if isinstance(row.get("step"), int)),
        checkpoints=tuple(checkpoints_in(directory / CHECKPOINTS, verify)),
        latest=_latest(directory / CHECKPOINTS),
        verified=verify,
        unfinished=tuple(sorted(str(path) for path in (directory / CHECKPOINTS).glob(".step-*.writing"))),
        saves=saves_of(events),
        bad_batches=tuple(sorted(str(path) for path in (directory / "non_finite").glob("*.jsonl"))),
        exported=tuple(str(directory / name) for name in ("hf", "adapter") if (directory / name).is_dir()),
        free_bytes=shutil.disk_usage(directory).free,
        remarks=tuple(remarks + cut),
    )


def attempts_of(events: Sequence[dict[str, Any]], errors: Sequence[dict[str, Any]]) -> list[Attempt]:
    """Build the attempts, in order of their start, from the lines of the event log and the errors of the ranks. Pure."""
    parts: list[list[dict[str, Any]]] = []
    for event in events:
        if event.get("event") == "start":
            parts.append([event])
        elif parts:
            parts[-1].append(event)
    attempt_errors: list[list[dict[str, Any]]] = [[] for _ in parts]
    early: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for record in sorted(errors, key=lambda record: _seconds(record.get("time"))):
        index = _attempt_of(record, [part[0] for part in parts])
        if index is None:
            # Without a start event, attempts of one launcher are distinguished by rank: a rank's second error is of the next one.
            launch = str(record.get("agent")), _number(record.get("attempt"))
            same = [records for key, records in early.items() if key[:2] == launch]
            repeats = sum(any(earlier.get("rank") == record.get("rank") for earlier in records) for records in same)
            early.setdefault((*launch, repeats), []).append(record)
        else:
            attempt_errors[index].append(record)
    attempts = [_attempt(part, part_errors) for part, part_errors in zip(parts, attempt_errors, strict=True)]
    attempts += [_attempt([], records) for records in early.values()]
    attempts.sort(key=lambda attempt: attempt.started or attempt.ended or 0.0)
    return [replace(attempt, number=number) for number, attempt in enumerate(attempts, 1)]


def _attempt_of(record: dict[str, Any], starts: Sequence[dict[str, Any]]) -> int | None:
    """Return the index of the start that an error belongs to, or None if its attempt never started."""
    if record.get("started") is False:
        return None
    fitting = [
        index
        for index, start in enumerate(starts)
        if start.get("attempt") == record.get("attempt")
        and _seconds(start.get("time")) <= _seconds(record.get("time")) + SLACK_S
    ]
    return fitting[-1] if fitting else None


def _attempt(events: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> Attempt:
    """Build an attempt from its events, of which the first is its start, and its errors; without events it never started."""
    start = events[0] if events else records[0]
    last = {event.get("event"): event for event in events}
    end = last.get("finished") or last.get("stopped")
    world_size = _number(start.get("world_size")) or None
    outcome, errors, silent = blame([_rank_error(record) for record in records], world_size)
    step = errors[0].step if errors else None
    ended = max((error.time for error in errors), default=None)
    if not errors and end is not None:
        outcome = "finished" if end["event"] == "finished" else "stopped"
        step, ended = _number(end.get("step")), _seconds(end.get("time"))
    host, pid, command = start.get("host"), start.get("pid"), start.get("command")
    return Attempt(
        restart=_number(start.get("attempt")),
        started=_seconds(start.get("time")) if events else None,
        world_size=world_size,
        resumed_after=_number(last.get("resumed", {}).get("step")),
        ended=ended,
        outcome=outcome,
        step=step,
        signal=str(end.get("signal")) if end is not None and outcome == "stopped" else None,
        errors=errors,
        silent=silent,
        process=(host, pid) if events and isinstance(host, str) and isinstance(pid, int) else None,
        platform=start.get("platform"),
        command=tuple(map(str, command)) if isinstance(command, list) else (),
        directory=start.get("directory"),
        start_ticks=start.get("start_ticks"),
    )


def blame(
    errors: Sequence[RankError], world_size: int | None
) -> tuple[Outcome, tuple[RankError, ...], tuple[int, ...]]:
    """Derive an attempt's outcome from its ranks' errors: outcome, errors with the cause first, ranks without an error.

    An error that only reports another rank as missing counts as the cause if there is no other kind. Pure.
    """
    if not errors:
        return "no end", (), ()
    ordered = sorted(errors, key=lambda error: (error.error in SECONDARY, error.time, error.rank))
    silent = sorted(set(range(world_size or 0)) - {error.rank for error in errors})
    missing = {int(rank) for error in errors for rank in re.findall(r"[Rr]ank (\d+) is gone", error.message)}
    if ordered[0].error in SECONDARY and silent:
        return "lost", tuple(ordered), tuple(rank for rank in silent if rank in missing) or tuple(silent)
    # After `lost`: a rank that was killed is the reason for an interrupt, not the other way round.
    if any(error.error == "KeyboardInterrupt" for error in errors):
        return "interrupted", tuple(ordered), tuple(silent)
    return "error", tuple(ordered), tuple(silent)


def saves_of(events: Sequence[dict[str, Any]]) -> SaveCounts:
    kinds = [event.get("event") for event in events]
    return SaveCounts(
        started=kinds.count("save"),
        completed=kinds.count("saved"),
        failures=tuple(str(event.get("problem")) for event in events if event.get("event") == "save_failed"),
        stall_s=tuple(_seconds(event.get("stall_s")) for event in events if event.get("event") == "save"),
    )


def checkpoints_in(directory: Path, verify: bool) -> list[CheckpointEntry]:
    if not directory.is_dir():
        return []
    entries = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            entries.append(CheckpointEntry(int(match[1]), path.name, size, tuple(_problems(path, verify))))
    return sorted(entries, key=lambda checkpoint: checkpoint.step)


def _problems(checkpoint: Path, verify: bool) -> list[str]:
    try:
        files = manifest.read(checkpoint).files
    except CheckpointError as error:
        return [str(error)]
    if verify:
        return manifest.problems(checkpoint, files, files)
    # Without --verify only presence is checked: reading all files can take minutes.
    return [f"{name} is missing" for name in files if not (checkpoint / name).is_file()]


def _latest(directory: Path) -> str | None:
    try:
        return (directory / "latest").read_text(errors="replace", encoding="utf-8").strip()
    except OSError:
        return None


def _rank_error(record: dict[str, Any]) -> RankError:
    return RankError(
        rank=_number(record.get("rank")),
        step=_number(record.get("step")),
        error=str(record.get("error")),
        message=str(record.get("message")),
        time=_seconds(record.get("time")),
        host=str(record.get("host")),
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
