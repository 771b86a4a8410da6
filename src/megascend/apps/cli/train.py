"""``megascend train``: run a YAML configuration on one process, on N processes started here, or under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from megascend.apps.cli import options
from megascend.apps.cli.launch import EXIT_STOPPED, start_ranks, under_torchrun
from megascend.apps.cli.messages import close_stdin

if TYPE_CHECKING:
    from megascend.apps.train.preflight import RunPlan
    from megascend.config import RunConfig, TrainerConfig


def train_command(
    config: options.RunFile,
    overrides: options.Overrides = None,
    nproc: options.Processes = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    dry_run: options.DryRun = False,
    profile: options.Profiled = False,
) -> None:
    """Train a Hugging Face checkpoint as CONFIG says.

    Runs one process, or --nproc processes, or as one rank of torchrun. An error exits with 2; a run that a signal has stopped,
    after saving a checkpoint, with 75.
    """
    from megascend.config import load_config

    settings = options.read_run_file(load_config, config, overrides)
    if dry_run:
        from megascend.apps.cli.dry_run_text import report as lines_of
        from megascend.apps.train.dry_run import dry_run as check

        print_dry_run(
            lambda plan, style: lines_of(check(plan, overwrite, resume), style), settings, nproc, overwrite, resume
        )
    else:
        start_training(train_rank, settings, nproc, overwrite, resume, profile)


def print_dry_run(
    lines_of: Callable[..., Any], settings: TrainerConfig, nproc: int | None, overwrite: bool, resume: str | None
) -> None:
    """Check a run without starting it, and print the result; under torchrun on rank 0 only."""
    import sys

    from megascend.apps.cli.dry_run_text import Style
    from megascend.apps.train.preflight import preflight
    from megascend.runtime.distributed.launch import Launch

    launch = Launch.from_environment()
    # All ranks would read the same data and report the same problems.
    if launch.rank > 0:
        return
    plan = preflight(settings, nproc or launch.world_size, overwrite, resume, starts_ranks=not under_torchrun())
    for line in lines_of(plan, Style.of(sys.stdout)):
        print(line)
    print("\ndry run: no problem found before training; nothing was trained or written", flush=True)


def start_training(
    function: Callable[..., str | None],
    settings: TrainerConfig,
    nproc: int | None,
    overwrite: bool,
    resume: str | None,
    profile: bool,
) -> None:
    """Check a run, start its ranks unless torchrun has, and exit with 75 if a signal has stopped it.

    Args:
        function: called on every rank, with the arguments of :func:`train_rank`.
        profile: record a profile; a section of the file takes precedence.
    """
    from megascend.apps.train.object_storage import fetch_checkpoint
    from megascend.apps.train.preflight import preflight
    from megascend.config import Profile
    from megascend.runtime.io.lasting_output import LastingOutput

    LastingOutput().install()  # until the process ends
    if profile and settings.profile is None:
        settings = settings.model_copy(update={"profile": Profile()})
    if under_torchrun(nproc):
        stopped = function(settings, overwrite, resume, None)
    else:
        # Once, in the parent: an error is one line, not one for each rank.
        plan = preflight(settings, nproc or 1, overwrite, resume)
        fetch_checkpoint(settings, overwrite, resume)
        stopped = start_ranks(function, settings, overwrite, resume, plan, nproc=nproc or 1)
    if stopped:
        raise typer.Exit(EXIT_STOPPED)


def train_rank(config: RunConfig, overwrite: bool, resume: str | None, plan: RunPlan[RunConfig] | None) -> str | None:
    """Run one rank; return the signal that stopped the run, if one did.

    Args:
        plan: results of the checks on this host; None under torchrun. It pickles without torch, as the settings do.
    """
    from megascend.apps.train.train import train

    prepare_rank(config)
    return train(config, overwrite=overwrite, resume=resume, plan=plan).stopped


def prepare_rank(config: TrainerConfig) -> None:
    """Set up a rank's output, which must survive a closed terminal, its warnings, and a closed stdin."""
    import warnings

    from megascend.runtime.io.lasting_output import LastingOutput

    LastingOutput().install()
    # Users of this command cannot act on deprecations inside these packages.
    warnings.filterwarnings("ignore", module=r"(megatron|mcore_bridge|torch\.distributed)\.")
    if config.trackers:
        close_stdin()
