"""Where a run begins: at the beginning, or from a checkpoint. Decided by rank 0, carried out by all."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.app.earlier_run import CHECKPOINTS, restore
from megascend.app.event_log import ERRORS, EVENTS, agent, read_lines
from megascend.app.liveness import process_lives
from megascend.checkpoint import manifest
from megascend.checkpoint.retention import Retention
from megascend.config import TrainerConfig
from megascend.distributed.launch import Launch
from megascend.errors import CheckpointError, ConfigError
from megascend.io.paths import why_not_writable

if TYPE_CHECKING:
    from megascend.app.event_log import EventLog
    from megascend.backend import Backend

logger = logging.getLogger(__name__)

RUN_FILES = (
    "metrics.jsonl", "config.yaml", "metrics.png", "hf", "adapter", "tensorboard", CHECKPOINTS, EVENTS, ERRORS, "non_finite",
    "profile", "trackers",
)  # fmt: skip
"""Everything a run writes into its output directory."""
JOURNAL = (EVENTS, ERRORS)
"""What of it tells how earlier attempts have ended."""
RESULTS = tuple(name for name in RUN_FILES if name not in JOURNAL)
"""The rest of it."""
WITHOUT_STEPS = (*JOURNAL, "config.yaml", "metrics.jsonl", "tensorboard", "trackers", CHECKPOINTS)
"""What a run leaves that has failed in its first step."""


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        candidates: checkpoints to resume from, the best first; empty: at the beginning.
        clear: which files of an earlier run to remove; all of them once this run has done a step.
        said: what the user should know about the choice.
    """

    candidates: tuple[Path, ...] = ()
    clear: tuple[str, ...] = ()
    said: str = ""


def check_start(output: Path, overwrite: bool, resume: str | Path | None, launch: Launch) -> None:
    """Refuse early, on every rank, what :func:`decide` would refuse for certain.

    Raises:
        ConfigError: the directory holds a run that is neither to be resumed nor overwritten, or is to be both, or has not ended;
            or it cannot be written to, as rank 0 sees it.
        CheckpointError: there is nothing at ``resume``.
    """
    if overwrite and resume is not None:
        raise ConfigError(
            f"--overwrite and --resume {resume} contradict each other: the first removes the run that the second resumes; "
            "leave one out"
        )
    if os.path.exists(output) and not output.is_dir():
        raise ConfigError(f"output: {output} exists and is not a directory")
    if launch.rank == 0:
        if problem := why_not_writable(output):
            raise ConfigError(f"output: {output} cannot be written: {problem}; choose another with --set output=PATH")
        restore(output)
    # Of a restarted run, only rank 0 is sure to be beside the launcher that it began with. With several hosts it alone decides.
    first = not restarted(output, launch) if launch.rank == 0 else launch.attempt == 0 and not launch.several_hosts
    if first and resume is None and not overwrite:
        refuse_earlier_run(output)
    if resume is not None and str(resume) != "auto" and not Path(resume).is_dir():
        raise CheckpointError(f"--resume {resume}: there is no such directory")
    if launch.rank == 0:
        decide(output, overwrite, resume, launch)


def decide(output: Path, overwrite: bool, resume: str | Path | None, launch: Launch) -> Start:
    """How the run in ``output`` begins. Reads files, changes none.

    A launcher that restarts a run (``torchrun --max-restarts``) resumes from its last checkpoint, whatever it was started with.

    Raises:
        ConfigError: there is an earlier run that is neither to be resumed nor overwritten, or has not ended.
        CheckpointError: there is no checkpoint at ``resume``.
    """
    own = tuple(Retention(output / CHECKPOINTS).candidates())
    if restarted(output, launch):
        if own:
            return Start(own, said=f"attempt {launch.attempt}: resuming from the last checkpoint")
        if resume is None or str(resume) == "auto":
            return Start(clear=RESULTS, said=f"attempt {launch.attempt}: no checkpoint yet, starting again at step 1")
    elif overwrite or resume is not None:
        refuse_running(output)
    if resume is None:
        if not overwrite:
            refuse_earlier_run(output)
        return Start(clear=RUN_FILES if overwrite else RESULTS)
    if str(resume) != "auto":
        found = checkpoints_at(Path(resume))
        if not found:
            raise CheckpointError(f"--resume {resume}: no complete checkpoint there")
        return Start(tuple(found))
    if own:
        return Start(own)
    if run_files(output):
        raise ConfigError(
            f"--resume auto: {output} holds a run but no complete checkpoint of it; start over with --overwrite, or choose "
            "another directory with --set output=PATH"
        )
    return Start(clear=RESULTS, said=f"--resume auto: no checkpoint in {output / CHECKPOINTS}, starting at step 1")


def checkpoints_at(path: Path) -> list[Path]:
    """Checkpoints at a path that is one, holds some, or is the directory of a run; the best first."""
    if (path / manifest.NAME).exists():
        return [path]
    return Retention(path / CHECKPOINTS).candidates() or Retention(path).candidates()


def saved_settings(output: Path, resume: str | Path | None, launch: Launch) -> dict[str, Any]:
    """Settings in the checkpoint that a run will resume from, as far as it can be read; empty without one."""
    candidates: list[Path] = []
    if restarted(output, launch) or str(resume) == "auto":
        candidates = Retention(output / CHECKPOINTS).candidates()
    if not candidates and resume is not None and str(resume) != "auto":
        candidates = checkpoints_at(Path(resume))
    for path in candidates:
        try:
            return manifest.read(path).config or {}
        except CheckpointError:
            continue  # as load_first_good() does, which reports it
    return {}


def refuse_earlier_run(output: Path) -> None:
    """Raise ConfigError if a directory holds a run."""
    held = run_files(output)
    if held:
        advice = "resume it with --resume auto, " if Retention(output / CHECKPOINTS).steps() else ""
        raise ConfigError(
            f"output: {output} holds an earlier run ({', '.join(held)}); {advice}choose another with --set output=PATH, or "
            "replace it with --overwrite"
        )


def run_files(output: Path) -> list[str]:
    """What a run has left in ``output`` that must not be lost.

    Nothing, where no run has taken a step: errors alone are of attempts that never began, and one that has failed in its first
    step may be tried again.
    """
    held = [name for name in RUN_FILES if (output / name).exists()]
    if held == [ERRORS] or (set(held) <= set(WITHOUT_STEPS) and failed_in_step_1(output)):
        return []
    return held


def failed_in_step_1(output: Path) -> bool:
    """True if the last run in ``output`` has surely ended, without a step that is logged or saved."""
    checkpoints = output / CHECKPOINTS
    if read_lines(output / "metrics.jsonl")[0] or (checkpoints.is_dir() and any(checkpoints.iterdir())):
        return False
    starts = [event for event in read_lines(output / EVENTS)[0] if event.get("event") == "start"]
    if not starts:
        return False
    since = starts[-1].get("time")
    if not isinstance(since, (int, float)):
        return False
    return error_since(output, since) or process_lives(starts[-1].get("host"), starts[-1].get("pid"), since) is False


def refuse_running(output: Path) -> None:
    """Raise ConfigError if a run of another process is at work in a directory, as far as can be told on this machine."""
    events = read_lines(output / EVENTS)[0]
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    if not starts:
        return
    start, later = events[starts[-1]], events[starts[-1] + 1 :]
    host, pid, since = (start.get(name) for name in ("host", "pid", "time"))
    if pid == os.getpid() or any(event.get("event") in ("finished", "stopped") for event in later):
        return
    if process_lives(host, pid, since) and not error_since(output, since):
        raise ConfigError(
            f"output: {output} is being written by another run, process {pid} on {host}: stop it first, or choose another with "
            "--set output=PATH"
        )


def error_since(output: Path, since: Any) -> bool:
    """Whether a rank of the run in ``output`` has left an error at ``since`` or later."""
    errors = [error for path in (output / ERRORS).glob("*.json") for error in read_lines(path)[0]]
    return any(isinstance(error.get("time"), (int, float)) and error["time"] >= since for error in errors)


def belongs(output: Path, resume: str | Path | None, launch: Launch) -> bool:
    """Whether a run that :func:`check_start` let pass may write to ``output`` before its first step.

    Not where it is to overwrite an earlier run: that stays as it is until the new one begins.
    """
    return resume is not None or not run_files(output) or restarted(output, launch)


def restarted(output: Path, launch: Launch) -> bool:
    """True if the launcher of the last run in ``output`` has started this process, too.

    With several hosts the number of the attempt does not tell: torchrun does not count a restart because of another host.
    """
    return (launch.attempt > 0 or launch.several_hosts) and restarts(output)


def restarts(output: Path) -> bool:
    """True if the last run in ``output`` was started by the same launcher as this process."""
    events, _ = read_lines(output / EVENTS)
    starts = [event for event in events if event.get("event") == "start"]
    return bool(starts) and starts[-1].get("agent") == agent()


def load_first_good(
    backend: Backend, candidates: tuple[Path, ...], event_log: EventLog
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Load the first checkpoint that is whole; each that is not is reported. Collective.

    Returns:
        What was saved as ``progress`` and ``config``.

    Raises:
        CheckpointError: none is; the message says what is wrong with each.
    """
    refused: list[str] = []
    for path in candidates:
        try:
            progress = backend.load(path)
        except CheckpointError as error:
            refused.append(str(error))
            event_log.event("refused", checkpoint=str(path), problem=str(error))
            if backend.rank == 0:
                logger.warning("not resuming from %s: %s", path.name, error)
            continue
        event_log.event("resumed", checkpoint=str(path), step=backend.step_count)
        if backend.rank == 0:
            print(f"resumed from {path} after step {backend.step_count}", flush=True)
        return progress, manifest.read(path).config
    raise CheckpointError(f"no checkpoint can be loaded: {' | '.join(refused)}")


def differences(saved: dict[str, Any] | None, config: TrainerConfig) -> list[str]:
    """Settings that are not as in the checkpoint, as ``key: old -> new``. Pure."""
    now = flattened(config.model_dump(mode="json"))
    before = flattened(_with_defaults(saved, type(config))) if saved is not None else now
    keys = sorted(now.keys() | before.keys())
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _with_defaults(saved: dict[str, Any], kind: type[TrainerConfig]) -> dict[str, Any]:
    """Settings of an earlier version, with the defaults of those that it did not have; of another kind of run as they are."""
    try:
        return kind(**saved).model_dump(mode="json")
    except ConfigError:
        return {"engine": "megatron", "plugins": []} | saved


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
