"""``megascend train``: run a YAML configuration on one process, on N processes started here, or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megascend.config import RunConfig

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start it again


def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings (see `megascend show-config`).")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Start this many processes here (not under torchrun).")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run's files in the output directory.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="auto|PATH",
            help="Resume from a checkpoint: the newest complete one in the output directory, or that at PATH.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check all that can be known before training, show samples and figures; no training."
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Record three steps: a trace for Perfetto, and what took the time in them."),
    ] = False,
) -> None:
    """Train a Hugging Face checkpoint as CONFIG says.

    Runs one process, or --nproc processes, or as one rank of torchrun. An error exits with 2; a run that a signal has stopped,
    after saving a checkpoint, with 75.
    """
    from megascend.app.lasting_output import LastingOutput
    from megascend.cli.launch import launch, under_torchrun
    from megascend.cli.preflight import check_run
    from megascend.config import load_config
    from megascend.errors import ConfigError

    settings = load_config(config, overrides)
    if dry_run:
        show_dry_run(settings, nproc, overwrite, resume)
        return
    LastingOutput().install()  # until the process ends
    if profile and settings.profile is None:
        overrides = [*(overrides or []), "profile={}"]
    if under_torchrun():
        if nproc is not None:
            raise ConfigError(
                f"--nproc {nproc} under torchrun: torchrun has started the processes already; leave it out"
            )
        stopped = train_rank(config, overrides, overwrite, resume)
        if stopped:
            raise typer.Exit(EXIT_STOPPED)
        return
    check_run(settings, nproc or 1, overwrite, resume)
    try:
        if (nproc or 1) == 1:
            stopped = train_rank(config, overrides, overwrite, resume)
        else:
            stopped = launch(train_rank, config, overrides, overwrite, resume, nproc=nproc or 1)
    except KeyboardInterrupt:
        typer.secho("interrupted", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None
    if stopped:
        raise typer.Exit(EXIT_STOPPED)


def show_dry_run(settings: RunConfig, nproc: int | None, overwrite: bool, resume: str | None) -> None:
    """Check a run and print what it would be; under torchrun, the first rank does so for all."""
    import sys

    from megascend.app.dry_run import dry_run
    from megascend.cli.dry_run_text import Style, report
    from megascend.cli.launch import under_torchrun
    from megascend.cli.messages import show_messages
    from megascend.cli.preflight import check_run
    from megascend.distributed.launch import Launch

    launch = Launch.from_environment()
    if launch.rank > 0:
        return
    world_size = nproc or launch.world_size
    show_messages()
    check_run(settings, world_size, overwrite, resume, starts=not under_torchrun())
    for line in report(dry_run(settings, world_size, resume), Style.of(sys.stdout)):
        print(line)
    print("\ndry run: nothing is wrong that can be known before training; nothing was trained or written", flush=True)


def train_rank(config: Path, overrides: list[str] | None, overwrite: bool, resume: str | None = None) -> str | None:
    """One rank of the run; returns the signal that stopped it, if one did.

    Takes and returns what pickles cheaply, so that neither side needs torch for it.
    """
    import warnings

    from megascend.app.lasting_output import LastingOutput
    from megascend.app.loop import train
    from megascend.cli.messages import ask_nothing, show_messages
    from megascend.config import load_config

    LastingOutput().install()
    show_messages()
    # Deprecations inside these packages are nothing that a user of this command could act on.
    warnings.filterwarnings("ignore", module=r"(megatron|mcore_bridge|torch\.distributed)\.")
    settings = load_config(config, overrides)
    if settings.trackers:
        ask_nothing()
    return train(settings, overwrite=overwrite, resume=resume).stopped
