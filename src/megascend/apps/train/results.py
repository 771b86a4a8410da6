"""Results of a run: checked before the first step, written after the last one; and the report of a run that was stopped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.train.checkpoint_policy import CheckpointPolicy
from megascend.apps.train.learner import Learner, Run
from megascend.apps.train.plot import plot_metrics
from megascend.apps.train.preflight import AnyConfig
from megascend.apps.train.push import push
from megascend.config import Push, TrainerConfig
from megascend.errors import CheckpointError, MissingDependencyError
from megascend.models.checkpoint_files import hub
from megascend.models.checkpoint_files.files import GENERATION_CONFIG, copy_tokenizer, write_ends
from megascend.runtime.io.paths import is_kept, unwritable_reason

if TYPE_CHECKING:
    from megascend.apps.train.event_log import EventLog
    from megascend.apps.train.run_directory import OutputDirectory
    from megascend.backend import Backend

logger = logging.getLogger(__name__)


def check_results(config: TrainerConfig, backend: Backend, overwrite: bool) -> None:
    """Check before the first step that the results can be written after the last one. Collective.

    Args:
        overwrite: an earlier run's results will be removed.
    """
    if config.lora is None and (config.export or config.checkpoint.hf):
        backend.check_export(config.output / "hf", replaces=overwrite)
    elif config.lora is not None and config.export:
        backend.from_rank_0(lambda: check_adapter_path(config.output / "adapter", overwrite))
    settings = config.push
    if settings is not None:

        def create() -> None:
            hub.check_access(settings.repository)
            hub.create_repository(settings.repository, private=settings.private)

        backend.from_rank_0(create)


def check_adapter_path(path: Path, overwrite: bool) -> None:
    from megascend.training.lora.adapter_io import check_target

    removed = overwrite and not is_kept(path)
    if not removed:
        check_target(path)
    if problem := unwritable_reason(path.parent if removed else path):
        raise CheckpointError(f"save_adapter: {path} cannot be written: {problem}")


def write_results(
    run: Run[AnyConfig], learner: Learner, saves: CheckpointPolicy, rows: Sequence[dict[str, Any]], step: int
) -> Path | None:
    """Export the model or adapter, plot the run and report its end; return the export's directory, if any. Collective."""
    config = run.config
    # First, so that a failing plot cannot cost the export.
    exported = None
    if config.export:
        best = load_best(run, learner, saves, step)
        exported = export(run, saves, step, best)
    if run.main_rank and config.plot:
        path = config.output / "metrics.png"
        try:
            plot_metrics(rows, path, learner.title(), learner.panels)
        except (OSError, MissingDependencyError) as error:
            logger.warning("%s cannot be written: %s", path, error)
    values, line = learner.result()
    # Not always ``step``: load_best() may have loaded an earlier one.
    exported_step = {} if exported is None else {"exported_step": run.backend.step_count}
    run.event_log.event("finished", step=step, **exported_step, **values)
    if run.main_rank:
        print(line, flush=True)
    return exported


def load_best(run: Run[AnyConfig], learner: Learner, saves: CheckpointPolicy, step: int) -> Path | None:
    """Load the best checkpoint if the last step is not the best one, and return its path. Collective."""
    if learner.best_step in (None, step):
        return None
    path = saves.best_path()
    if path is None:
        if run.main_rank:
            logger.warning(
                "the checkpoint of step %d, the best one, was not written: exporting step %d", learner.best_step, step
            )
        return None
    run.backend.load(path)
    if run.main_rank:
        print(f"exporting step {learner.best_step}, the best one", flush=True)
    return path


def export(run: Run, saves: CheckpointPolicy, step: int, best: Path | None = None) -> Path:
    """Write the trained model, or only the adapter if one was trained, and return its directory. Collective.

    Args:
        best: the checkpoint that has been loaded in place of the last step.
    """
    config, backend = run.config, run.backend
    path = config.output / ("hf" if run.adapter is None else "adapter")
    try:
        if run.adapter is None:
            backend.export_hf(path)
        else:
            backend.save_adapter(run.adapter, path, optimizer=False)
            backend.from_rank_0(lambda: copy_tokenizer(config.model, path, backend.chat_template))
            missing = backend.from_rank_0(lambda: write_ends(config.model, path, backend.ends))
            if missing and run.main_rank:
                logger.warning(
                    "the adapter ends its answers with token %s, at which %s does not stop: generate with eos_token_id of %s",
                    ", ".join(map(str, missing)),
                    config.model,
                    path / GENERATION_CONFIG,
                )
    except CheckpointError as error:
        # With ``best`` loaded, the model is no longer that of the last step, and must not be saved as such.
        remedy = saves.keep(step) if best is None else f"{best} still holds the weights to export"
        raise CheckpointError(f"{error}; {remedy}") from error
    return path


def report_stop(directory: OutputDirectory, step: int, signal: str, problem: str | None) -> None:
    """Report that a signal, or a callback, has stopped the run after ``step``.

    Args:
        problem: why there is no checkpoint of that step.
    """
    main_rank = directory.backend.rank == 0
    if directory.holds_earlier_run:
        if main_rank:
            print(
                f"stopped by {signal} before a step was done; the earlier run in {directory.config.output} is unchanged",
                flush=True,
            )
        return
    if problem is not None:
        raise CheckpointError(f"stopped by {signal} after step {step}, without a checkpoint: {problem}")
    directory.event_log.event("stopped", step=step, signal=signal)
    if main_rank:
        print(f"stopped by {signal} after step {step}; resume with --resume auto", flush=True)


def upload(exported: Path, settings: Push, event_log: EventLog, step: int) -> None:
    """Upload the export of a run whose last step is ``step`` to the Hub. On rank 0 only."""
    with event_log.recording_errors(lambda: step):
        print(f"uploading {exported} to {settings.repository}", flush=True)
        address = push(exported, settings)
    event_log.event("pushed", address=address)
    print(f"uploaded: {address}", flush=True)
