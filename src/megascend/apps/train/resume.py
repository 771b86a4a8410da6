"""Start of a run: from step 1 or from a checkpoint, decided by rank 0 and carried out by all."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megascend.apps.tracking.built_in import flattened
from megascend.apps.train.event_log import EVENTS, agent, read_lines
from megascend.apps.train.run_backend import ADAPTER
from megascend.apps.train.run_directory import (
    CHECKPOINTS,
    EXPORTS,
    RESULTS,
    RUN_FILES,
    OutputDirectory,
    check_shared,
    refuse_earlier_run,
    refuse_locked,
    refuse_running,
    restore,
    run_files,
    write_config,
)
from megascend.config import TrainerConfig
from megascend.errors import CheckpointError, ConfigError, redacted
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.paths import unwritable_reason
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.train.event_log import EventLog
    from megascend.backend import Backend

TrainerConfigT = TypeVar("TrainerConfigT", bound=TrainerConfig)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartPoint:
    """Start of a run.

    Attributes:
        candidates: checkpoints to resume from, the best first; empty: start at step 1.
        clear: names of an earlier run's files to remove, once this run has completed a step.
        remark: message to the user about the choice.
    """

    candidates: tuple[Path, ...] = ()
    clear: tuple[str, ...] = ()
    remark: str = ""


def check_start(output: Path, overwrite: bool, resume: str | Path | None, launch: Launch) -> None:
    """Raise early, on every rank, errors that :func:`decide` would raise later.

    Raises:
        ConfigError: the directory holds a run, and neither or both of ``resume`` and ``overwrite`` are set; or that run has not
            ended; or rank 0 cannot write to the directory.
        CheckpointError: ``resume`` is a path that does not exist.
    """
    if overwrite and resume is not None:
        raise ConfigError(
            f"--overwrite and --resume {resume} contradict each other: the first removes the run that the second resumes; "
            "leave one out"
        )
    if os.path.exists(output) and not output.is_dir():
        raise ConfigError(f"output: {output} exists and is not a directory")
    if launch.rank == 0:
        if problem := unwritable_reason(output):
            raise ConfigError(f"output: {output} cannot be written: {problem}; choose another with --set output=PATH")
        refuse_locked(output)  # before restore(), which would undo what a run in progress is moving
        # A start that was killed may have left an earlier run's files moved away; decide() must see them.
        restore(output)
    # Rank 0 compares its launcher with that of the last run. Other ranks may have been started by another host's launcher: they
    # use the number of the attempt and, with several hosts, leave the decision to rank 0.
    first = not restarted(output, launch) if launch.rank == 0 else launch.attempt == 0 and not launch.several_hosts
    if first and resume is None and not overwrite:
        refuse_earlier_run(output)
    if resume is not None and str(resume) != "auto" and not Path(resume).is_dir():
        raise CheckpointError(f"--resume {resume}: not a directory; name a checkpoint, the directory of a run, or auto")
    if launch.rank == 0:
        decide(output, overwrite, resume, launch)


def decide(output: Path, overwrite: bool, resume: str | Path | None, launch: Launch) -> StartPoint:
    """Decide where the run in ``output`` starts. Reads files, changes none.

    A run that its launcher restarts (``torchrun --max-restarts``) resumes from its last checkpoint, whatever its options are.
    """
    checkpoints = tuple(Retention(output / CHECKPOINTS).candidates())
    # First: the restarted command may still have --overwrite, which must not remove this run's own files.
    if restarted(output, launch):
        if checkpoints:
            return StartPoint(checkpoints, remark=f"attempt {launch.attempt}: resuming from the last checkpoint")
        if resume is None or str(resume) == "auto":
            return StartPoint(
                clear=RESULTS, remark=f"attempt {launch.attempt}: no checkpoint yet, starting again at step 1"
            )
    elif overwrite or resume is not None:
        refuse_running(output)
    if resume is None:
        if not overwrite:
            refuse_earlier_run(output)
        return StartPoint(clear=RUN_FILES if overwrite else RESULTS)
    if str(resume) != "auto":
        candidates = tuple(checkpoints_at(Path(resume)))
        if not candidates:
            raise CheckpointError(f"--resume {resume}: no complete checkpoint there")
        return StartPoint(candidates)
    if checkpoints:
        return StartPoint(checkpoints)
    if run_files(output) and not never_saved(output):
        raise ConfigError(
            f"--resume auto: {output} holds a run but no complete checkpoint of it; start over with --overwrite, or choose "
            "another directory with --set output=PATH"
        )
    return StartPoint(
        clear=RESULTS, remark=f"--resume auto: no checkpoint in {output / CHECKPOINTS}, starting at step 1"
    )


def never_saved(output: Path) -> bool:
    """Return True if the run in ``output`` was ended before its first checkpoint and has exported nothing."""
    events, _ = read_lines(output / EVENTS)
    kinds = {event.get("event") for event in events}
    return (
        "start" in kinds
        and not kinds & {"saved", "resumed", "finished"}
        and not any(os.path.lexists(output / name) for name in EXPORTS)
    )


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints at ``path``: itself, those in it, or those of the run in it; the best first."""
    if (path / manifest.NAME).exists():
        return [path]
    return Retention(path / CHECKPOINTS).candidates() or Retention(path).candidates()


def with_template_date(
    config: TrainerConfigT, tokenizer: PreTrainedTokenizerBase, resume: str | Path | None, launch: Launch
) -> TrainerConfigT:
    """Return the settings with ``template_date`` set, for a chat template that writes a date: the checkpoint's, or today's.

    config.yaml and all checkpoints store it, so that a run resumed on another day renders the same text.
    """
    from megascend.apps.data.chat import writes_date

    if config.template_date is not None or not writes_date(tokenizer):
        return config
    saved = next(saved_manifests(config.output, resume, launch), None)
    day = None if saved is None else (saved.config or {}).get("template_date")
    return config.model_copy(update={"template_date": date.fromisoformat(day) if day else date.today()})


def saved_manifests(output: Path, resume: str | Path | None, launch: Launch) -> Iterator[manifest.CheckpointManifest]:
    """Yield the manifests of the checkpoints that a run may resume from, the best first, as far as they can be read."""
    candidates: list[Path] = []
    if restarted(output, launch) or str(resume) == "auto":
        candidates = Retention(output / CHECKPOINTS).candidates()
    if not candidates and resume is not None and str(resume) != "auto":
        candidates = checkpoints_at(Path(resume))
    for path in candidates:
        try:
            yield manifest.read(path)
        except CheckpointError:
            continue  # as load_first_good() does, which reports it


def may_write(output: Path, resume: str | Path | None, launch: Launch) -> bool:
    """Return True if a run that passed :func:`check_start` may write to ``output`` before its first step.

    False if it will overwrite an earlier run, whose files are kept until then.
    """
    return resume is not None or not run_files(output) or restarted(output, launch)


def restarted(output: Path, launch: Launch) -> bool:
    """Return True if the launcher of the last run in ``output`` has also started this process.

    With several hosts the number of the attempt is not enough: torchrun does not count restarts that another host causes.
    """
    return (launch.attempt > 0 or launch.several_hosts) and has_same_launcher(output)


def has_same_launcher(output: Path) -> bool:
    events, _ = read_lines(output / EVENTS)
    starts = [event for event in events if event.get("event") == "start"]
    return bool(starts) and starts[-1].get("agent") == agent()


def begin(
    config: TrainerConfig,
    backend: Backend,
    event_log: EventLog,
    overwrite: bool,
    resume: str | Path | None,
    progress_keys: Sequence[str],
) -> tuple[OutputDirectory, dict[str, Any] | None]:
    """Decide where the run starts, and load the checkpoint if it resumes. Collective.

    Args:
        progress_keys: keys of the progress that this kind of run saves.

    Returns:
        The output directory, and the saved progress; None for a run that starts at step 1.
    """
    launch, output = backend.groups.launch, config.output
    # On rank 0 only: hosts may see different states of a directory on a network file system.
    start = backend.from_rank_0(lambda: decide(output, overwrite, resume, launch))
    # Before the first file is written there.
    check_shared(backend, output)

    def earlier_files() -> tuple[tuple[str, ...], bool]:
        present = tuple(name for name in start.clear if os.path.lexists(output / name))
        return present, bool(present and run_files(output))

    present, holds_run = backend.from_rank_0(earlier_files)
    # Files of an attempt without a completed step hold no result, and are removed at once.
    replaces_run = holds_run and EVENTS in start.clear
    directory = OutputDirectory(config, backend, event_log, present, holds_earlier_run=replaces_run)
    if backend.rank == 0 and start.remark:
        print(start.remark, flush=True)
    if not directory.holds_earlier_run:
        directory.clear()
    event_log.start(
        hold=directory.holds_earlier_run,
        platform=backend.platform.name,
        steps=config.steps,
        every=config.checkpoint.every,
    )
    if not start.candidates:
        if not directory.holds_earlier_run and backend.rank == 0:
            write_config(config)
        return directory, None
    backend.from_rank_0(lambda: check_adapter(config, start.candidates))
    path, progress = load_first_good(backend, start.candidates, event_log)
    if backend.step_count > config.steps:
        raise ConfigError(
            f"steps: {config.steps}, and the checkpoint to resume from is after step {backend.step_count}: set steps to "
            f"{backend.step_count} or more, or name an earlier one with --resume PATH"
        )
    apply_adapter_settings(backend, config, path)
    changed = differences(manifest.read(path).config, config)
    if changed and backend.rank == 0:
        print(f"settings that differ from the checkpoint's: {'; '.join(changed)}", flush=True)
    # After the load: a checkpoint of another kind of run may have the same model.
    missing = [key for key in progress_keys if key not in progress]
    if missing:
        raise CheckpointError(
            f"{start.candidates[0].parent}: this checkpoint is of another kind of run: its progress has no {', '.join(missing)}"
        )
    return directory, progress


def check_adapter(config: TrainerConfig, candidates: Sequence[Path]) -> None:
    """Raise ConfigError if an adapter with this run's rank and scaling could not continue the one of a checkpoint.

    Args:
        candidates: checkpoints to resume from, of which the best one with a readable manifest is compared.
    """
    for path in candidates:
        try:
            saved = (manifest.read(path).config or {}).get("lora")
        except CheckpointError:
            continue  # as load_first_good() does, which reports it
        if saved is None or config.lora is None:
            return
        for name in ("rank", "alpha", "rslora"):
            value = getattr(config.lora, name)
            if saved[name] != value:
                raise ConfigError(
                    f"lora.{name}: {value}, and the adapter in {path} has {saved[name]}: set lora.{name}: {saved[name]}, or "
                    "begin a new run"
                )
        return


def apply_adapter_settings(backend: Backend, config: TrainerConfig, checkpoint: Path) -> None:
    """Give this run's settings to the adapter that a checkpoint has restored together with those of its own run. Collective."""
    if config.lora is None or backend.adapters[ADAPTER].lora == config.lora:
        return
    try:
        backend.load_adapter(ADAPTER, checkpoint / "adapters" / ADAPTER, lora=config.lora, replace=True)
    except ConfigError as error:
        raise ConfigError(f"lora.targets: {error}: set lora.targets as in that run, or begin a new one") from error


def load_first_good(backend: Backend, candidates: tuple[Path, ...], event_log: EventLog) -> tuple[Path, dict[str, Any]]:
    """Load the first checkpoint that is complete and undamaged; report each one that is not. Collective.

    Returns:
        Its path, and the saved ``progress``.
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
        return path, progress
    raise CheckpointError(f"no checkpoint can be loaded: {' | '.join(refused)}. To start over: --overwrite")


def differences(saved: dict[str, Any] | None, config: TrainerConfig) -> list[str]:
    """Return the settings that differ from the checkpoint's, as ``key: old -> new``. Pure."""
    now = flattened(redacted(config.model_dump(mode="json")))
    # Redacted again: an earlier version saved passwords.
    before = flattened(redacted(_with_defaults(saved, type(config)))) if saved is not None else now
    # An empty section counts as absent: filling it is reported by its keys alone.
    before, now = ({key: value for key, value in flat.items() if value != {}} for flat in (before, now))
    keys = sorted(now.keys() | before.keys())
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _with_defaults(saved: dict[str, Any], kind: type[TrainerConfig]) -> dict[str, Any]:
    """Fill in defaults of settings that an earlier version did not have; leave settings that are no longer valid unchanged."""
    try:
        return kind(**saved).model_dump(mode="json")
    except ConfigError:
        return {"engine": "megatron", "plugins": []} | saved
