"""``megascend train``: run a YAML configuration on one process, on N processes started here, or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
) -> None:
    """Train a Hugging Face checkpoint as CONFIG says.

    Runs one process, or --nproc processes, or as one rank of torchrun. An error exits with 2.
    """
    from megascend.cli.launch import launch, under_torchrun
    from megascend.cli.preflight import check_run
    from megascend.config import load_config
    from megascend.errors import ConfigError

    settings = load_config(config, overrides)
    if under_torchrun():
        if nproc is not None:
            raise ConfigError(
                f"--nproc {nproc} under torchrun: torchrun has started the processes already; leave it out"
            )
        train_rank(config, overrides, overwrite)
        return
    check_run(settings, nproc or 1, overwrite)
    try:
        if (nproc or 1) == 1:
            train_rank(config, overrides, overwrite)
        else:
            launch(train_rank, config, overrides, overwrite, nproc=nproc or 1)
    except KeyboardInterrupt:
        typer.secho("interrupted", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None


def train_rank(config: Path, overrides: list[str] | None, overwrite: bool) -> None:
    """One rank of the run. Takes what pickles cheaply, so that a worker needs no torch to receive it."""
    import warnings

    from megascend.config import load_config
    from megascend.train.loop import train

    # Deprecations inside these packages are nothing that a user of this command could act on.
    warnings.filterwarnings("ignore", module=r"(megatron|mcore_bridge|torch\.distributed)\.")
    train(load_config(config, overrides), overwrite=overwrite)
